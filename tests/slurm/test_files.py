"""What can be said of jobs without a Slurm: files of rows and clusters, commands, starts without progress."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from common.report.cli import UsageError
from common.report.registry import ROOT, load_table
from slurm.job import Allocation, Attempt, JobError, cell, main, newest_step, training_command
from slurm.rows import FOLDER, all_files
from slurm.submit import CLUSTERS, Cluster, ended, folder, submitted


def test_the_rows_files_fit_the_tables() -> None:
    wanted = all_files()
    assert {file: file.read_text() for file in FOLDER.glob("*/*.sbatch")} == wanted, "run `python -m slurm.rows`"
    assert len(wanted) >= 29


def test_a_row_of_table_3() -> None:
    """arXiv 2410.11998: 32 T4 on 4 nodes."""
    text = (FOLDER / "table3" / "accumadam_aer.sbatch").read_text()
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert text.endswith(
        "exec bash slurm/train.sbatch cnn experiment=table3/accumadam_aer "
        "'run_dir=runs/table3/accumadam_aer/seed_${seed}' \"$@\"\n"
    )


@pytest.mark.parametrize("workers", [4, 8, 16, 32])
def test_servers_of_eight_gpus_are_nodes(workers: int) -> None:
    """arXiv 2110.13363: a server of 8 GPUs is a node of the graph."""
    text = (FOLDER / "exponential" / f"ring_{workers}.sbatch").read_text()
    assert f"#SBATCH --nodes={workers}\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text


@pytest.mark.parametrize("file", sorted(CLUSTERS.iterdir()), ids=lambda file: file.name)
def test_clusters_hold_options_of_sbatch_only(file: Path) -> None:
    for line in file.read_text().splitlines():
        assert line.startswith(("#", "--"))
        assert line.startswith("#") or "=" in line


@pytest.mark.parametrize(
    ("name", "more", "ranks", "nodes"),
    [("t4_4x8", None, 32, 4), ("a100_4x4", None, 16, 4), ("t4_8x8", None, 64, 8), (None, "--ntasks-per-node=2", 6, 3),
     ("a40_4x4", "--gpus-per-node=a40:8", 32, 4)],
)  # fmt: skip
def test_nodes_follow_from_the_ranks(name: str | None, more: str | None, ranks: int, nodes: int) -> None:
    options = Cluster.load(name, more).for_ranks(ranks)
    assert [option for option in options if option.startswith("--nodes")] == [f"--nodes={nodes}"]


def test_ranks_that_do_not_fill_their_nodes_are_an_error() -> None:
    with pytest.raises(UsageError, match="6 ranks on nodes of 4"):
        Cluster.load("a100_4x4").for_ranks(6)


def test_an_unknown_cluster_is_an_error() -> None:
    with pytest.raises(UsageError, match="cluster=h100: expected one of: a100_4x4"):
        Cluster.load("h100")


VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURMD_NODENAME": "node1",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_JOB_CPUS_PER_NODE": "64(x3),32",
}


def test_the_allocation_is_read_from_slurms_variables() -> None:
    assert Allocation.read(VARIABLES) == Allocation("7", 4, "node1", ranks_per_node=2, cpus_per_node=32)
    assert Allocation.read(VARIABLES | {"SLURM_GPUS_ON_NODE": "8"}).ranks_per_node == 8
    with pytest.raises(JobError, match="not inside a Slurm job"):
        Allocation.read({})


def test_one_torchrun_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRUN_OPTIONS", "--container-image='my image'")
    command = training_command(Allocation.read(VARIABLES), "gpt2", ["seed=2"], "3")
    assert command[0] == "srun"
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--container-image=my image"} <= set(command)
    after = command[command.index("slurm/node.sh") + 1 :]
    assert {"--nnodes=4", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=7.3"} <= set(after)
    assert after[-5:] == ["-m", "slurm.rank", "gpt2", "seed=2", "resume=true"]
    own = training_command(Allocation.read(VARIABLES), "gpt2", ["resume=false"], "0")
    assert own[-1] == "resume=false"


def test_what_the_user_adds_wins_and_the_report_runs_where_the_runs_do() -> None:
    cluster = Cluster.load("t4_4x8", "-p gpu --account=physics --gpus-per-node 4 --exclusive")
    assert cluster.for_ranks(32) == (
        "--gpus-per-node=4", "--account=physics", "--partition=gpu",
        "--cpus-per-gpu=16", "--mem-per-gpu=64G", "--exclusive", "--nodes=8",
    )  # fmt: skip
    assert cluster.for_report() == ("--account=physics", "--partition=gpu")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program in the path that answers this to every call."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def write(name: str, answer: str) -> None:
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
        file.chmod(0o755)

    return write


def started(run: Path, job: str) -> None:
    (run / "slurm").mkdir(parents=True)
    (run / "slurm" / "starts.jsonl").write_text(json.dumps({"job": job, "step": 0}) + "\n")


@pytest.mark.parametrize(
    ("job", "state", "refused"), [("6", "RUNNING", True), ("6", "", False), ("7", "RUNNING", False)]
)
def test_a_run_is_trained_by_one_job_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program, job: str, state: str, refused: bool
) -> None:
    program("squeue", state)
    started(tmp_path / "run", job)
    with (tmp_path / "log").open("ab", buffering=0) as log:
        attempt = Attempt(Allocation.read(VARIABLES), "cnn", [], tmp_path / "run", log)
        if not refused:
            attempt._check_alone()
            return
        with pytest.raises(JobError, match="job 6 is training it now"):
            attempt._check_alone()


def test_what_slurm_has_is_not_submitted_again(tmp_path: Path, program) -> None:
    """Elements of arrays that were submitted here, and runs that another job has started."""
    table = load_table("table3")
    first, second, *others = table.cells(tmp_path)
    file = folder(table, tmp_path) / "cells of today.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([first.task, *first.overrides]) + "\n")
    elsewhere = tmp_path / "elsewhere.jsonl"
    started(second.run_dir, "9")
    started(others[0].run_dir, "8")  # which has ended
    lines = [
        f"5 0 PENDING /home/me/slurm/train.sbatch --cells {file}",
        f"6 0 RUNNING /home/me/slurm/train.sbatch --cells {elsewhere}",
        f"9 N/A RUNNING /home/me/slurm/table3/{second.row.name}.sbatch seed={second.seed}",
        "10 N/A RUNNING (null)",
    ]
    program("squeue", "\n".join(lines))
    assert submitted(table, tmp_path) == {first.run_dir: "pending (job 5)", second.run_dir: "running (job 9)"}


@pytest.mark.parametrize("answer", ["CANCELLED by 1000", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_accounting_says_how_a_job_ended(tmp_path: Path, program, answer: str) -> None:
    assert ended(tmp_path) is None
    started(tmp_path, "7")
    program("sacct", answer)
    assert ended(tmp_path) == f"{answer.split()[0].lower()} (job 7)"


def test_an_array_element_takes_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text('["cnn", "seed=1"]\n["gpt2", "name=a b"]\n')
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert cell(str(file)) == ["gpt2", "name=a b"]


@pytest.mark.parametrize("argv", [[], ["resnet"], ["seed=1"]])
def test_an_unknown_task_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "expected cnn, transformer or gpt2" in capsys.readouterr().err


def test_a_job_that_gets_nowhere_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "slurm").mkdir()

    def start(job: str = "7") -> None:
        allocation = Allocation.read(VARIABLES | {"SLURM_JOB_ID": job})
        with (tmp_path / "log").open("ab", buffering=0) as log:
            Attempt(allocation, "cnn", [], tmp_path, log)._check_progress()

    start()
    start()
    with pytest.raises(JobError, match="began 2 times at step 0"):
        start()
    start(job="8")  # somebody submits it again: that job may try, too
    checkpoint = tmp_path / "checkpoints" / "step_00000120"
    checkpoint.mkdir(parents=True)
    assert newest_step(tmp_path) == 0  # it has no manifest: not complete
    (checkpoint / "manifest.json").write_text("{}")
    assert newest_step(tmp_path) == 120
    start()  # it got further
    start()
    with pytest.raises(JobError, match="began 2 times at step 120"):
        start()
    starts = [json.loads(line) for line in (tmp_path / "slurm" / "starts.jsonl").read_text().splitlines()]
    assert [(start["job"], start["step"]) for start in starts] == [("7", 0), ("7", 0), ("8", 0), ("7", 120), ("7", 120)]


@pytest.mark.parametrize(
    "file", ["train.sbatch", "report.sbatch", "node.sh", "environment.sh", "local/up.sh", "local/down.sh"]
)
def test_shell_files_parse(file: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "slurm" / file)], check=True)
