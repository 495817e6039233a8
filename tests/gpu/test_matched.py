"""GPT-2 in the paper's regime: as many runs of the table gpt2_matched as the time allows; the next start goes on."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from common.cli import UsageError
from common.experiments import load
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from gpt2.model import parameter_count
from scripts import reproduce
from tests.gpt2.corpora import pattern, write_tokens
from tests.gpu.device import Device, on_gpu, program

CHECK = 12, "GPT-2 by gossip and by all-reduce"
TABLE, TEXT = "gpt2_matched", "source=debian_prose"
LIMIT_S, TO_END_S = 1200.0, 30.0  # without GPU_LEFT_S, and of the time that is left
JOBS = 3  # runs at a time: small ones, which leave most of a GPU idle


def judge(runs: Path, number: int) -> tuple[str, bool]:
    """Return what the finished runs show, and whether that is all of them; each must have learned to use context."""
    with suppress(UsageError):  # no run has finished
        found = load.load(TABLE, runs)[0]
        assert (found["validation_loss"] < found["unigram_entropy"]).all(), found["validation_loss"].tolist()
        means = found.groupby("row")[["validation_loss", "local_over_noise"]].mean()
        each = ", ".join(f"{row} {loss:.3f} ({noise:.3f})" for row, loss, noise in means.itertuples())
        figure = f"{len(found)} of {number} runs; validation loss (batch of a worker over noise scale): {each}"
        return figure, len(found) == number
    return f"0 of {number} runs", False


@on_gpu
def test_the_matched_run(device: Device, figure: Callable[[str], None]) -> None:
    end = time.monotonic() + float(os.environ.get("GPU_LEFT_S", LIMIT_S)) - TO_END_S
    with suppress(subprocess.TimeoutExpired):  # what is killed goes on next time, runs from their last checkpoint
        code, output = program("gpt2.prepare", TEXT, limit_s=end - time.monotonic())
        if code:
            pytest.skip(f"no text: {output.strip()[-200:]}")
        arguments = [f"table={TABLE}", f"jobs={JOBS}"]
        code, output = program("scripts.reproduce", *arguments, limit_s=max(1.0, end - time.monotonic()))
        assert code == 0, output[-4000:]
    said, complete = judge(Path("runs"), len(list(load_table(TABLE).cells(Path("runs")))))
    if not complete:
        pytest.skip(f"{said}; `make gpu-check` goes on")
    figure(said)


def small(folder: Path) -> Table:
    """Return the table with a tiny model, few steps and a text that is soon learned."""
    write_tokens(folder, pattern(20_000), pattern(4_000, seed=1))
    more = ["data=tokens", f"data.folder={folder}", "model.vocabulary=32", "model.width=16", "model.heads=2"]
    more += ["model.context=16", "training.steps=80", "training.threads=1", "schedule.warmup=8", "evaluation.every=20"]
    more += ["optimizer.lr=0.02"]
    table = load_table(TABLE)
    return table.model_copy(update={"seeds": table.seeds[:1], "overrides": (*table.overrides, *more)})


@pytest.mark.slow
def test_the_table_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = small(tmp_path / "text")
    for module in (reproduce, load):
        monkeypatch.setattr(module, "load_table", lambda _: table)
    assert judge(tmp_path, 3) == ("0 of 3 runs", False)
    for rows, number in (("rows=accumadam_aer", 1), ("rows=allreduce,dadam_aer", 3)):
        assert reproduce.main([f"table={TABLE}", rows, f"runs={tmp_path}"]) == 0
        said, complete = judge(tmp_path, 3)
        assert said.startswith(f"{number} of 3 runs; validation loss")
        assert complete == (number == 3)
    assert all(f"{row.name} " in said and "nan" not in said for row in table.rows)


def test_the_regime_is_that_of_the_recipe() -> None:
    table = load_table(TABLE)
    recipe = compose_config("gpt2", ["experiment=gpt2/accumadam_aer"])
    for row in table.rows:
        config = compose_config("gpt2", list(table.settings(row, None)))
        assert (config.n, config.workers.per_host) == (recipe.n, recipe.workers.per_host)
        assert (config.training.clip, config.optimizer.weight_decay) == (recipe.training.clip, 0.1)
        assert config.training.batch_size // config.n * config.model.context == 768
        assert round(parameter_count(config.model), -4) == 170_000
        assert config.optimizer.lr == 0.004
        if row.name == "accumadam_aer":
            assert (config.optimizer.betas, config.optimizer.accumulation_steps) == (recipe.optimizer.betas, 8)
