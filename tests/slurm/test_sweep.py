"""Tuning on Slurm: arrays of trials, and the job after them that goes on."""

import json
import shlex
from pathlib import Path

import pytest

from common.experiments.tables import load_table
from common.experiments.trials import Trials, first_grid, grown
from scripts.sweep import main
from tests.experiments.synthetic import write_run

TABLE = ["table=table3_fair", "launcher=slurm"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_trial_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.submit.ranks_of", lambda cell: 1)
    monkeypatch.setattr("scripts.lib.submitting.missing_data", lambda cells: [])


def trials(grid: range | None = None) -> list:
    table = load_table("table3_fair")
    return list(Trials.of_table(table, grid or first_grid(table.sweep)).cells(Path("runs")))


def test_trials_are_an_array_and_the_same_command_follows_it(calls: Path, capsys) -> None:
    assert main([*TABLE, "sbatch=--partition=cpu", "report_sbatch=--time=5"]) == 0
    _, array, after = calls.read_text().splitlines()
    cells = trials()
    assert [json.loads(line) for line in Path(shlex.split(array)[-1]).read_text().splitlines()] == [
        [cell.task, *cell.overrides] for cell in cells
    ]
    assert "runs/sweeps/table3_fair/slurm/" in array
    assert "--dependency=afterany:11" in after
    assert after.endswith(
        "--partition=cpu --time=5 slurm/sweep.sbatch table=table3_fair launcher=slurm sbatch=--partition=cpu "
        f"report_sbatch=--time=5 submitted={len(cells)}"
    )
    assert "then: 11, which submits the next trials, or chooses" in capsys.readouterr().out


def test_the_job_that_follows_submits_the_next_trials_but_none_that_failed(calls: Path, capsys) -> None:
    first = first_grid(load_table("table3_fair").sweep)
    cells = trials(first)
    again = [*TABLE, f"submitted={len(cells)}"]
    assert main(again) == 1
    assert f"error: {len(cells)} of these runs failed" in capsys.readouterr().err
    assert not calls.exists()
    for cell in cells:  # the lowest rate is the best
        rate = float(cell.row.name.rpartition("lr_")[2])
        write_run(cell.run_dir, cell.overrides, accuracy=[90 - 1000 * rate])
    assert main(again) == 0
    *_, array, after = calls.read_text().splitlines()
    new = [cell for cell in trials(grown(first, {"lowest"})) if cell not in cells]
    assert len(new) == 3 * 2
    assert len(Path(shlex.split(array)[-1]).read_text().splitlines()) == len(new)
    assert after.endswith(f"submitted={len(cells) + len(new)}")
