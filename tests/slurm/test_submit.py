"""Submitting tables, with programs that answer as Slurm does."""

import json
import shlex
from pathlib import Path

import pytest

from common.report.registry import Table, load_table
from scripts.reproduce import main
from slurm.submit import ended, folder, submitted
from tests.slurm.fakes import started


def test_what_slurm_has_is_not_submitted_again(tmp_path: Path, program, caplog: pytest.LogCaptureFixture) -> None:
    """Elements of arrays that were submitted here, and runs that another job has started."""
    table = load_table("table3")
    first, second, *others = table.cells(tmp_path)
    file = folder(table, tmp_path) / "cells of today.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([first.task, *first.overrides]) + "\n")
    started(second.run_dir, "9")
    started(others[0].run_dir, "8")  # which has ended
    lines = [
        f"5 0 PENDING /home/me/slurm/train.sbatch --cells {file}",
        f"6 0 RUNNING /home/me/slurm/train.sbatch --cells {tmp_path}/elsewhere.jsonl",
        f"7 0 RUNNING /home/me/slurm/train.sbatch --cells {file.parent}/removed.jsonl",
        f"9 N/A RUNNING /home/me/slurm/table3/{second.row.name}.sbatch seed={second.seed}",
        "10 N/A RUNNING (null)",
        "11 N/A RUNNING ",
    ]
    program("squeue", "\n".join(lines))
    assert submitted(table, tmp_path) == {first.run_dir: "pending (job 5)", second.run_dir: "running (job 9)"}
    assert [record.args[0] for record in caplog.records] == ["7"]


@pytest.mark.parametrize("answer", ["CANCELLED by 1000", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_accounting_says_how_a_job_ended(tmp_path: Path, program, answer: str) -> None:
    assert ended(tmp_path) is None
    started(tmp_path, "7")
    program("sacct", answer)
    assert ended(tmp_path) == f"{answer.split()[0].lower()} (job 7)"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Table:
    """The quickstart's with one seed; runs go to an empty folder."""
    table = load_table("quickstart").model_copy(update={"seeds": (1,)})
    monkeypatch.setattr("scripts.reproduce.load_table", lambda name: table)
    monkeypatch.chdir(tmp_path)
    return table


SBATCH = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
*--test-only*) exit 0 ;;
*report.sbatch*) [ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }; echo 12 ;;
*) echo "11;cluster" ;;
esac
"""


@pytest.mark.parametrize("refuse", ["", "Requested partition needs GPUs"])
def test_a_table_is_an_array_and_a_report(
    table: Table, tmp_path: Path, program, monkeypatch: pytest.MonkeyPatch, capsys, refuse: str
) -> None:
    """If Slurm refuses the report, the runs stay."""
    program("squeue", "")
    program("sbatch", SBATCH, raw=True)
    program("scancel", 'echo "scancel $*" >>"$CALLS"', raw=True)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSE", refuse)
    options = ["sbatch=-p gpu --ntasks-per-node=2", "report_sbatch=--partition=cpu"]
    assert main(["table=quickstart", "launcher=slurm", *options]) == (1 if refuse else 0)
    tested, array, report = (tmp_path / "calls").read_text().splitlines()
    rows = len(table.rows)
    file = Path(shlex.split(array)[-1])
    assert tested == "--test-only --ntasks-per-node=2 --partition=gpu --cpus-per-task=2 --nodes=2 slurm/train.sbatch"
    assert array.startswith(f"--parsable --array=0-{rows - 1} --job-name=quickstart --output={tmp_path}/runs/")
    assert file.is_absolute()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        [cell.task, *cell.overrides] for cell in table.cells(Path("runs"))
    ]
    assert "--dependency=afterany:11" in report
    assert "--partition=gpu --partition=cpu slurm/report.sbatch table=quickstart runs=runs" in report
    out, err = capsys.readouterr()
    assert f"0 of {rows} finished, 0 with Slurm, {rows} to submit\nsubmitted: 11\n" in out
    assert ("then: 12, which builds results/tables/quickstart.*" in out) == (not refuse)
    assert refuse in err
    assert ("\nsbatch --dependency=afterany:11" in err) == bool(refuse)


def test_commands_are_shown_without_slurm(table: Table, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["table=quickstart", "launcher=slurm", "--dry-run"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(commands) == len(table.rows)
    assert all(line.startswith("sbatch --ntasks-per-node=1 --cpus-per-task=2 --nodes=4 slurm/") for line in commands)
    assert main(["table=quickstart", "launcher=slurm"]) == 2
    assert "squeue is not installed here" in capsys.readouterr().err
