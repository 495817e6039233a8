"""Submitting tables, with programs that answer as Slurm does."""

import json
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.experiments.tables import Cell, Table, load_table
from scripts.lib.submitting import missing_data
from scripts.reproduce import main
from slurm.queue import ended, folder, submitted
from slurm.submit import sized
from tests.slurm.fakes import SBATCH, VARIABLES, started


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
        f"5 5_0 0 PENDING /home/me/slurm/train.sbatch --cells {file}",
        f"6 6_0 0 RUNNING /home/me/slurm/train.sbatch --cells {tmp_path}/elsewhere.jsonl",
        f"7 7_0 0 RUNNING /home/me/slurm/train.sbatch --cells {file.parent}/removed.jsonl",
        f"9 4_3 3 RUNNING /home/me/slurm/train.sbatch cnn seed={second.seed}",
        "10 10 N/A RUNNING (null)",
        "11 11 N/A RUNNING ",
    ]
    program("squeue", "\n".join(lines))
    assert submitted(table, tmp_path) == {first.run_dir: "pending (job 5_0)", second.run_dir: "running (job 4_3)"}
    assert [record.args[0] for record in caplog.records] == ["7_0"]


def test_a_folder_is_the_same_in_any_spelling(table: Table, tmp_path: Path, calls: Path, program, capsys) -> None:
    assert main(["table=quickstart", "launcher=slurm"]) == 0
    file = shlex.split(calls.read_text().splitlines()[1])[-1]
    program("squeue", "\n".join(f"5 5_{k} {k} PENDING train.sbatch --cells {file}" for k in range(len(table.rows))))
    assert main(["table=quickstart", "launcher=slurm", f"runs={tmp_path}/runs"]) == 0
    assert f"{len(table.rows)} with Slurm, 0 to submit" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["CANCELLED by 1000", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_accounting_says_how_a_job_ended(tmp_path: Path, program, answer: str) -> None:
    assert ended(tmp_path) is None
    started(tmp_path, "7")
    program("sacct", f"7|{answer}")
    assert ended(tmp_path) == f"{answer.split()[0].lower()} (job 7)"
    program("sacct", f"4_3|{answer}")
    assert ended(tmp_path) == f"{answer.split()[0].lower()} (job 4_3)"


def test_without_accounting_an_element_has_the_name_that_squeue_shows(tmp_path: Path, program) -> None:
    started(tmp_path, "7")
    program("sacct", "Slurm accounting storage is disabled", fails=True)
    program("scontrol", "JobId=7 ArrayJobId=4 ArrayTaskId=3 JobName=a JobState=CANCELLED Reason=None")
    assert ended(tmp_path) == "cancelled (job 4_3)"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Table:
    """The quickstart's with one seed, whose runs have 4 ranks and are not composed; runs go to an empty folder."""
    table = load_table("quickstart").model_copy(update={"seeds": (1,)})
    monkeypatch.setattr("slurm.submit.ranks_of", lambda cell: 4)
    monkeypatch.setattr("scripts.reproduce.load_table", lambda name: table)
    monkeypatch.chdir(tmp_path)
    return table


@pytest.mark.parametrize("refuse", ["", "Requested partition needs GPUs"])
def test_a_table_is_an_array_and_a_report(
    table: Table, tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys, refuse: str
) -> None:
    """If Slurm refuses the report, the runs stay."""
    monkeypatch.setenv("REFUSE", refuse)
    options = ["sbatch=-p gpu --ntasks-per-node=2", "report_sbatch=--partition=cpu"]
    assert main(["table=quickstart", "launcher=slurm", *options]) == (1 if refuse else 0)
    tested, array, report = calls.read_text().splitlines()
    rows = len(table.rows)
    file = Path(shlex.split(array)[-1])
    asked = "--ntasks-per-node=2 --partition=gpu --cpus-per-task=2 --nodes=2 slurm/train.sbatch"
    assert tested == f"--test-only --array=0-{rows - 1} {asked}"
    assert array.startswith(f"--parsable --array=0-{rows - 1} --job-name=quickstart --output={tmp_path}/runs/")
    assert file.is_absolute()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        [cell.task, *cell.overrides] for cell in table.cells(Path("runs"))
    ]
    assert "--dependency=afterany:11" in report
    assert "--partition=gpu --partition=cpu slurm/report.sbatch table=quickstart runs=runs" in report
    out, err = capsys.readouterr()
    assert f"0 of {rows} finished, 0 with Slurm, {rows} to submit\nsubmitted: 11\n" in out
    assert ("then: 12, which builds runs/report/quickstart.*" in out) == (not refuse)
    assert f"\nlogs: {tmp_path}/runs/quickstart/slurm/" in out
    assert refuse in err
    assert ("\nsbatch --dependency=afterany:11" in err) == bool(refuse)


@pytest.mark.parametrize("known", [True, False])
def test_more_runs_than_an_array_takes_are_split_or_refused(
    table: Table, calls: Path, program, capsys, known: bool
) -> None:
    """Where Slurm does not say how many it takes, it says so of --test-only, before anything is submitted."""
    limit = 'case "$*" in *--array=0-[4-9]*) echo "sbatch: error: Invalid job array specification" >&2; exit 1 ;; esac'
    program("scontrol", "MaxArraySize            = 4", fails=not known)
    program("sbatch", SBATCH.replace("\n", f"\n{limit}\n", 1), raw=True)
    assert main(["table=quickstart", "launcher=slurm"]) == (0 if known else 2)
    out, err = capsys.readouterr()
    if not known:
        assert "submitted" not in out
        assert f"{len(table.rows)} runs may be more" in err
        assert "rows=... or seeds=..." in err
        return
    arrays = [line.split() for line in calls.read_text().splitlines() if "--cells" in line]
    cells = [json.loads(line) for array in arrays for line in Path(array[-1]).read_text().splitlines()]
    assert cells == [[cell.task, *cell.overrides] for cell in table.cells(Path("runs"))]
    assert arrays[0][1] == "--array=0-3"


def test_where_there_are_no_arrays_none_is_submitted(table: Table, calls: Path, program, capsys) -> None:
    program("scontrol", "MaxArraySize            = 0")
    assert main(["table=quickstart", "launcher=slurm"]) == 2
    assert "MaxArraySize=0: this Slurm takes no job arrays" in capsys.readouterr().err


def test_a_value_of_a_table_is_not_an_argument(capsys) -> None:
    assert main(["table=table3", "optimizer.lr=1e-3"]) == 2
    assert "in its definition: copy results/definitions/tables/table3.yaml" in capsys.readouterr().err


def test_rows_and_seeds_are_submitted_by_their_number_of_nodes(tmp_path: Path, calls: Path, capsys) -> None:
    part = ["rows=ring_8,ring_4,grid_4", "seeds=[2,9]", f"runs={tmp_path}/runs"]
    assert main(["table=exponential", "launcher=slurm", *part]) == 0
    *tested, small, large, report = calls.read_text().splitlines()
    assert len(tested) == 2
    asked = "--gpus-per-node=8 --cpus-per-gpu=5 --nodes={} slurm/train.sbatch --cells "
    assert small.startswith("--parsable --array=0-3 --job-name=exponential ")
    assert asked.format(4) in small
    assert large.startswith("--parsable --array=0-1 --job-name=exponential ")
    assert asked.format(8) in large
    for array, rows in ((small, ["ring_4", "grid_4"]), (large, ["ring_8"])):
        cells = [json.loads(line) for line in Path(array.split()[-1]).read_text().splitlines()]
        folders = [f"run_dir={tmp_path}/runs/exponential/{row}/seed_{seed}" for row in rows for seed in (2, 9)]
        assert [cell[-1] for cell in cells] == folders
        assert [cell[-2] for cell in cells] == ["seed=2", "seed=9"] * len(rows)
    assert "--dependency=afterany:11:11" in report
    out = capsys.readouterr().out
    assert out.startswith("# seeds that the table does not count: 9; its own are 1, 2, 3\n")
    assert "0 of 6 finished, 0 with Slurm, 6 to submit\nsubmitted: 11, 11\nthen: 12, " in out


def test_a_job_that_submits_hands_on_its_account_but_not_its_own_size(
    table: Table, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As slurm/table.sbatch does."""
    own = VARIABLES | {"SLURM_MEM_PER_NODE": "1000", "SLURM_JOB_ACCOUNT": "physics", "SLURM_JOB_PARTITION": "gpu"}
    for name, value in (own | {"SLURM_CONF": "/etc/mine.conf"}).items():
        monkeypatch.setenv(name, value)
    assert main(["table=quickstart", "launcher=slurm"]) == 0
    lines = calls.read_text().splitlines()
    assert len(lines) == 3
    assert all("--account=physics --partition=gpu" in line for line in lines)
    handed_on = Path(f"{calls}.environment").read_text().splitlines()
    assert [line for line in handed_on if line.startswith("SLURM")] == ["SLURM_CONF=/etc/mine.conf"]


def test_rows_of_one_table_may_need_different_clusters() -> None:
    """A row's own preset replaces its table's; cluster=... replaces both."""
    table = load_table("figure6_runs").model_copy(update={"seeds": (1,)})
    cells = [cell for cell in table.cells(Path("runs")) if cell.row.name in ("allreduce_32", "allreduce_64")]
    sizes = [[o for o in options if o.startswith(("--nodes", "--gpus"))] for options in sized(table, cells, None, None)]
    assert sizes == [["--gpus-per-node=4", "--nodes=8"], ["--gpus-per-node=8", "--nodes=8"]]
    (both, _) = sized(table, cells, "v100_4x8", None).items()
    assert "--cpus-per-gpu=5" in both[0]


def commands_of(table: Table, capsys) -> tuple[list[str], str]:
    """The commands that a dry run shows, and its one comment on the queue."""
    assert main(["table=quickstart", "launcher=slurm", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (comment,) = [line for line in lines if "queue" in line]
    assert lines[-1] == f"# 0 of {len(table.rows)} finished, 0 with Slurm, {len(table.rows)} to submit"
    return [line for line in lines if not line.startswith("#")], comment


def test_data_that_are_missing_here_are_told_once() -> None:
    settings = ("data=imagenet", "model=resnet50", "data.folder=nowhere", "workers.count=2")
    cells = [Cell("cnn", SimpleNamespace(name=row), seed, settings, Path("x")) for row in "ab" for seed in (1, 2)]
    (problem,) = missing_data(cells)
    assert problem.startswith("data.folder=nowhere: nowhere/train.beton is missing")
    assert missing_data([Cell("cnn", SimpleNamespace(name="a"), 1, (), Path("x"))]) == []


def test_commands_are_shown_without_slurm(table: Table, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    commands, comment = commands_of(table, capsys)
    assert len(commands) == len(table.rows)
    assert all(line.startswith("sbatch --ntasks-per-node=1 --cpus-per-task=2 --nodes=4 slurm/") for line in commands)
    assert "squeue is not installed here" in comment
    assert main(["table=quickstart", "launcher=slurm"]) == 2
    assert "squeue is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("squeue", "reason"),
    [
        (
            "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n",
            "Unable to contact",
        ),
        ("#!/bin/sh\nexec sleep 60\n", "no answer within 0.5 s"),
    ],
)
def test_commands_are_shown_where_no_slurm_answers(
    table: Table, program, monkeypatch: pytest.MonkeyPatch, capsys, squeue: str, reason: str
) -> None:
    """Nor is it asked how the last jobs ended."""
    for name in ("squeue", "sacct", "scontrol"):
        program(name, squeue, raw=True)
    started(next(table.cells(Path("runs"))).run_dir, "7")
    monkeypatch.setattr("scripts.lib.submitting.DRY_RUN_TIMEOUT_S", 0.5)
    monkeypatch.setattr("slurm.queue.TIMEOUT_S", 0.5)
    begin = time.monotonic()
    commands, comment = commands_of(table, capsys)
    assert len(commands) == len(table.rows)
    assert comment.startswith("# cannot query the queue: squeue --me")
    assert reason in comment
    assert time.monotonic() < begin + 30
    assert main(["table=quickstart", "launcher=slurm"]) == 2
    assert reason in capsys.readouterr().err
