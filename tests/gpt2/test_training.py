"""Whole runs: processes against the simulator, resuming, what is saved, what the keys do."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.launch.compose import compose_config
from common.launch.processes import launch
from gpt2.encode import unigram_entropy
from gpt2.model import GPT2
from gpt2.task import TASK
from tests.gpt2.corpora import TINY, pattern, write_tokens
from tests.training import runs

METHODS = {
    "dadam": ["topology=aer", "optimizer=adamw"],
    "accumadam": ["topology=aer", "optimizer=accumadamw", "optimizer.accumulation_steps=3"],
    "muon": ["topology=aer", "optimizer=muon", "parallel.local_steps=2"],
}
RUN = [
    "data=tokens",
    "data.evaluation_batches=4",
    *TINY,
    "workers.count=4",
    "workers.per_host=2",
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "schedule.warmup=2",
    "training.steps=12",
    "training.batch_size=16",
    "training.threads=1",
    "training.device=cpu",
    "evaluation.every=6",
    "evaluation.batch_size=8",
    "logging.every=3",
    "logging.progress=false",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokens = {"train": pattern(6000), "val": pattern(700, seed=1)}
    counts = np.bincount(np.concatenate([*tokens.values()]))
    write_tokens(folder, **tokens, unigram_entropy=unigram_entropy(counts))
    return folder


def train(data: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of a run, without wall-clock figures."""
    assert launch("gpt2", [*RUN, f"data.folder={data}", f"run_dir={run}", *overrides]) == 0
    return runs.rows(run)


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def newest(run: Path) -> Any:
    """Return the contents of a simulation's newest checkpoint."""
    return load(max((run / "checkpoints").glob("step_*")) / "rank_0.pt")


def test_processes_and_simulation_agree(folder: Path, tmp_path: Path) -> None:
    arguments = [*METHODS["accumadam"], "model.dropout=0.1"]
    real = train(folder, tmp_path / "processes", *arguments)
    simulated = train(folder, tmp_path / "simulated", *arguments, "workers=simulated")
    assert [(row["step"], row["split"]) for row in real] == [
        (3, "train"), (6, "train"), (6, "validation"), (9, "train"), (12, "train"), (12, "validation")
    ]  # fmt: skip
    for one, other in zip(real, simulated, strict=True):
        assert one.keys() == other.keys()
        assert one["bytes_sent"] == other["bytes_sent"]
        for name in one.keys() & {"loss", "train_loss", "perplexity", "grad_norm", "consensus_distance"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3), name
    evaluated = {"loss", "perplexity", "train_loss", "unigram_entropy", "consensus_distance"}
    assert real[-1].keys() == evaluated | {"step", "split", "epoch", "bytes_sent"}
    assert real[-1]["consensus_distance"] > 0


@pytest.mark.parametrize("method", ["accumadam", "muon"])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(method: str, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Step 5 lies within a window of the accumulation, within an epoch of 11 steps, and between two train rows.
    arguments = [*METHODS[method], "workers=simulated", "model.dropout=0.1", "training.steps=14"]
    arguments += ["training.batch_size=64", "training.checkpoint_every=5", "training.checkpoints_kept=3"]
    arguments += ["data.evaluation_windows=drawn"]
    whole, expected = train(folder, run, *arguments), newest(run)
    assert whole[-1]["epoch"] > 1
    for step in (14, 10):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    (run / "summary.json").unlink()
    assert train(folder, run, *arguments, "resume=true") == whole
    for one, other in zip(newest(run)["workers"], expected["workers"], strict=True):
        assert all(torch.equal(one["model"][name], tensor) for name, tensor in other["model"].items())
        assert one["streams"][0]["drawn"] == other["streams"][0]["drawn"] == 14


def test_best_and_last_are_mean_models(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    write_tokens(data, pattern(6000), -pattern(700) % 32)  # what is learned of the one is wrong of the other
    longer = ["training.steps=60", "evaluation.every=10", "model.width=32"]
    rows = train(data, run, *METHODS["dadam"], "workers=simulated", *longer)
    evaluations = [row for row in rows if row["split"] == "validation"]
    assert min(row["loss"] for row in evaluations) < evaluations[-1]["loss"]
    states = [worker["model"] for worker in newest(run)["workers"]]
    last, best = load(run / "checkpoints" / "last.pt"), load(run / "checkpoints" / "best.pt")
    for name, tensor in last.items():
        mean = torch.stack([state[name] for state in states]).double().mean(0)
        assert torch.allclose(tensor.double(), mean, atol=1e-6)
    config = compose_config("gpt2", [*RUN, f"data.folder={data}", *longer])
    task = TASK(config)
    for state, loss in ((best, min(row["loss"] for row in evaluations)), (last, evaluations[-1]["loss"])):
        model = GPT2(config.model).eval()
        model.load_state_dict(state)
        with torch.no_grad():
            batches = [batch for split, batch in task.evaluation_data(0, 1, 8, torch.device("cpu")) if split == "val"]
            values = [model(batch[:, :-1], batch[:, 1:]).item() for batch in batches]
        assert sum(values) / len(values) == pytest.approx(loss, rel=1e-5)


def test_a_run_on_data_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*RUN, f"data.folder={tmp_path}/none", f"run_dir={tmp_path}/run", "workers=simulated"]
    assert launch("gpt2", arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: data.folder={tmp_path}/none: ")
    assert "make the data with: python -m gpt2.prepare" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
