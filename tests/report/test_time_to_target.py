"""Time to a target: when runs reached it, how much faster rows are, and runs on emulated hosts."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.tables import Table, load_table
from common.report.tables import build_table, shown
from scripts.lib.making import make
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")
HOSTS = {"hosts": 4, "ranks_per_host": 2, "mbit_per_s": 100, "delay_ms": 1, "compute_ms": 50}
RECORDED = HOSTS | {"condition": "even", "slow": None, "engine": None}
TIMED = {
    "target": {"metric": "accuracy", "value": 80.0, "best": "highest"},
    "baseline": "allreduce",
    "variants": {"slow": ["workers.count=8"]},
    "emulated": {"slow": HOSTS},
    "columns": [
        "method",
        *(f"slow_time_to_target_s_{name}" for name in ("median", "lowest", "highest", "reached", "speedup")),
        "slow_steps_to_target_median",
        "slow_host_megabytes_to_target_median",
    ],
}


def timed(accuracy: dict[str, list[tuple[float, float]]]) -> Table:
    """Return the table, and write runs of 30 steps of 0.1 s with evaluations after 15 and 30."""
    table = make_table(**TIMED)
    for cell in table.cells(RUNS):
        values = accuracy[cell.row.name][cell.seed - 1]
        write_run(
            cell.run_dir,
            cell.overrides,
            accuracy=values,
            kind="processes",
            time_step_ms=100.0,
            bytes_sent=240_000_000,
            environment={"emulated": RECORDED},
        )
    return table


def test_median_extremes_and_speed_up():
    late, early = (50.0, 90.0), (85.0, 90.0)
    table = timed({"allreduce": [late, late, late], "accumadam_aer": [early, late, early]})
    texts = shown(build_table(collect(table, RUNS)), table)
    time = {name: texts[f"slow_time_to_target_s_{name}"].tolist() for name in ("median", "lowest", "reached")}
    assert time == {"median": ["3.0", "1.5"], "lowest": ["3.0", "1.5"], "reached": ["3", "3"]}
    assert texts["slow_steps_to_target_median"].tolist() == ["30", "15"]
    assert texts["slow_host_megabytes_to_target_median"].tolist() == ["60", "30"]  # half of what its two send
    baseline, speedup = texts["slow_time_to_target_s_speedup"]
    assert baseline == "baseline"
    assert speedup.startswith(f"{2 ** (2 / 3):.2f} [")  # geometric mean of 2, 1 and 2


def test_runs_that_never_reach_it():
    late, never = (50.0, 90.0), (50.0, 60.0)
    table = timed({"allreduce": [late, late, late], "accumadam_aer": [late, never, never]})
    frame = build_table(collect(table, RUNS))
    assert frame["slow_time_to_target_s_median"].tolist() == [3.0, math.inf]
    assert frame["slow_time_to_target_s_reached"].tolist() == [3, 1]
    assert shown(frame, table)["slow_time_to_target_s_speedup"].tolist() == ["baseline", "not reached by all"]


def test_commands_bring_up_the_hosts_of_the_variant():
    cell = next(make_table(**TIMED).cells(RUNS))
    assert cell.command == (
        "python -m scripts.emulate hosts=4 ranks_per_host=2 mbit_per_s=100.0 delay_ms=1.0 compute_ms=50.0 "
        "limit_s=86400 'run=-m cnn.train experiment=small workers.count=8 parallel=allreduce optimizer=adam seed=1 "
        "run_dir=runs/small/allreduce/slow/seed_1'"
    )


def test_a_row_of_another_engine():
    content = copy.deepcopy(CONTENT) | TIMED
    content["rows"][0]["engine"] = "decent_dp"
    table = make_table(**content)
    commands = [cell.command for cell in table.cells(RUNS)]
    assert ["engine=decent_dp" in command for command in commands] == [True] * 3 + [False] * 3
    with pytest.raises(ValueError, match="engine=decent_dp: expected in a table with emulated hosts only"):
        make_table(rows=content["rows"])


def test_runs_from_other_hosts_do_not_count():
    late = (50.0, 90.0)
    table = timed({"allreduce": [late] * 3, "accumadam_aer": [late] * 3})
    faster = make_table(**TIMED | {"emulated": {"slow": HOSTS | {"mbit_per_s": 200}}})
    missing = collect(faster, RUNS, allow_empty=True).missing
    assert len(missing) == 6
    assert "made on emulated hosts {'hosts': 4" in missing[0].reason
    cells = list(table.cells(RUNS))
    with pytest.raises(UsageError, match="jobs=2: expected 1: runs on emulated hosts are timed"):
        make(table, cells, ["missing"] * len(cells), jobs=2)


class Process:
    """What emulates hosts, interrupted while it runs."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options, self.calls = command, options, []

    def wait(self) -> int:
        self.calls.append("wait")
        if self.calls == ["wait"]:
            raise KeyboardInterrupt
        return 1

    def terminate(self) -> None:
        self.calls.append("terminate")


def test_an_interrupted_run_ends_before_the_command_does(monkeypatch: pytest.MonkeyPatch):
    """Hosts are removed and workers save; torchrun's exit code does not tell that they did."""
    late, started = (50.0, 90.0), []
    table = timed({"allreduce": [late] * 3, "accumadam_aer": [late] * 3})
    cell = next(iter(table.cells(RUNS)))
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(Process(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        make(table, [cell], ["interrupted"], jobs=1)
    (process,) = started
    assert process.calls == ["wait", "terminate", "wait"]
    assert process.options == {"start_new_session": True}
    assert any("resume=true" in argument for argument in process.command)


def test_an_interrupted_run_of_decent_dp_begins_anew(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    late = (50.0, 90.0)
    table = timed({"allreduce": [late] * 3, "accumadam_aer": [late] * 3})
    cell = list(table.cells(RUNS))[3]
    cell = replace(cell, emulated=cell.emulated.model_copy(update={"engine": "decent_dp"}))
    monkeypatch.setattr("subprocess.Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        make(table, [cell], ["interrupted"], jobs=1)
    assert not cell.run_dir.exists()
    assert "decent-dp keeps no state to continue from" in capsys.readouterr().err


def test_values_that_another_table_tuned(tmp_path: Path):
    content = copy.deepcopy(CONTENT) | {"tuned_by": "table3_fair"}
    content["rows"][0]["tuned_with"] = "allreduce"
    OmegaConf.save(content, tmp_path / "small.yaml")
    table = load_table("small", folder=tmp_path)
    assert table.untuned is None
    first, *_, last = table.cells(RUNS)
    assert "optimizer.lr=0.002" in first.overrides
    assert not any(text.startswith("optimizer.lr") for text in last.overrides)
    content["rows"][0]["tuned_with"] = "alreduce"
    OmegaConf.save(content, tmp_path / "small.yaml")
    assert load_table("small", folder=tmp_path).untuned == "results/sweeps/table3_fair.yaml: has no alreduce"
    missing = load_table("small", folder=tmp_path, sweeps=tmp_path)
    assert missing.untuned.startswith("table3_fair is not tuned yet: results/sweeps/table3_fair.yaml is missing")
