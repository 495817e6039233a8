"""Times of recovery are read from notes of steps; a killed worker is outlived, and a run is restarted."""

import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from common.torch_internals import can_reconfigure
from scripts.benchmarks import recovery
from scripts.benchmarks.task import read_notes


def note(folder: Path, pid: int, *steps: tuple[float, int, int]) -> None:
    (folder / "steps").mkdir(exist_ok=True)
    (folder / "steps" / str(pid)).write_text("".join(f"{t} {size} {opened}\n" for t, size, opened in steps) + "17")


def test_survivors_have_completed_a_step_when_the_last_one_begins_another(tmp_path: Path) -> None:
    note(tmp_path, 1, (9.0, 3, 1), (10.1, 3, 1), (10.2, 3, 1), (10.5, 3, 2), (10.6, 3, 2), (10.7, 3, 2))
    note(tmp_path, 2, (9.0, 3, 4), (10.4, 3, 5))
    note(tmp_path, 3, (9.0, 3, 1))
    assert recovery.gone_on(tmp_path, {1, 2}, 10.0) is None
    note(tmp_path, 2, (9.0, 3, 4), (10.4, 3, 5), (10.9, 3, 5))
    assert recovery.gone_on(tmp_path, {1, 2}, 10.0) == 10.9


def test_everybody_trains_again_when_there_are_as_many_as_before(tmp_path: Path) -> None:
    killed = time.time() - 1
    for pid in (1, 2):
        note(tmp_path, pid, (killed + 0.1, 2, 2), (killed + 0.2, 3, 3), (killed + 0.3, 3, 3))
    assert recovery.everybody(tmp_path, killed, 3) is None
    note(tmp_path, 4, (killed + 0.2, 3, 2), (killed + 0.4, 3, 2))
    assert recovery.everybody(tmp_path, killed, 3) == pytest.approx(killed + 0.4, abs=1e-5)
    assert recovery.everybody(tmp_path, killed + 0.35, 3) is None


def test_the_time_of_a_step(tmp_path: Path) -> None:
    """0.1 s, but for the recovery from 3 s to 4 s and the second after it."""
    times = recovery.calm_times(0.0, [3.0, 8.9], [1.0, 0.2], 10.0)
    assert times == [(0.0, 3.0), (5.0, 8.9)]
    steps = [0.1 * step + 0.05 for step in range(100)]
    note(tmp_path, 1, *((begun, 2, 1) for begun in steps))
    note(tmp_path, 2, *((begun, 2, 1) for begun in steps if not 3.0 < begun < 5.0))
    notes = read_notes(tmp_path / "steps")
    assert recovery.begun(notes, 2.0, 6.0) == 40 + 20
    assert recovery.calm_step_s(notes, times, 2) == pytest.approx(0.1)


@pytest.mark.slow
def test_a_kill_is_outlived_and_restarted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchft with short timeouts alone: its own are all that differs in the other row."""
    measure = recovery.measure

    def once(arguments: recovery.BenchArguments, program: list[str], restarts: bool) -> dict[str, float]:
        if program[:4] == [*recovery.TORCHFT, "3", "0"]:
            return dict.fromkeys(list(recovery.COLUMNS)[3:], 1.0)  # what is measured
        return measure(arguments, program, restarts)

    monkeypatch.setattr(recovery, "measure", once)
    command = ["workers=3", "kills=1", "every_s=4", "checkpoint_every=20", "--torchft", f"output={tmp_path}"]
    assert recovery.main(command) == 0
    assert "recovery.csv and .md" in capsys.readouterr().out
    record = pd.read_csv(tmp_path / "recovery.csv").set_index("how")
    reconfigured = ["elastic, reconfigured"] if can_reconfigure(torch.device("cpu")) else []
    assert list(record.index) == ["elastic", *reconfigured, "restart", "torchft", "torchft, 300 ms"]
    assert (record.survivors_s <= record.all_s).all()
    assert (record.goodput.drop("restart") > 0).all()  # a restart can take all the time that is measured
    assert (record.step_ms < 1000 * record.survivors_s).all()
