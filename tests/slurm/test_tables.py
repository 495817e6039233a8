"""Whole tables on a real Slurm, what it refuses, and what its start refuses."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.report.definitions import ROOT
from tests.slurm.conftest import Slurm

pytestmark = pytest.mark.slow  # on a real Slurm

TABLE = """
title: "Jobs"
task: cnn
runs: jobs
seeds: [1]
overrides: [experiment=quickstart, training.steps=40, model.width=2, workers.count=2]
rows:
  - {name: good, method: AllReduce, topology: complete, overrides: [parallel=allreduce, optimizer=adam]}
  - {name: bad, method: DAdam, topology: aer, overrides: [topology=aer, optimizer=adam, optimizer.lr=1e30]}
"""


def test_a_table_is_built_from_the_rows_that_did_not_fail(slurm: Slurm, tmp_path: Path) -> None:
    copy = tmp_path / "repository"  # a table is a file in results/definitions/tables, which a test does not write to
    for name in ("cnn", "common", "configs", "slurm", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "results" / "definitions" / "tables" / "jobs.yaml").write_text(TABLE)
    submit = [sys.executable, "-m", "scripts.reproduce", "table=jobs", "launcher=slurm", f"runs={tmp_path}/runs"]

    def call(*more: str) -> str:
        done = subprocess.run(
            [*submit, *more], cwd=copy, env=slurm.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    answer = call("sbatch=--ntasks-per-node=2")
    assert "2 to submit" in answer
    report = answer.split("\nthen: ")[1].split(",")[0]
    again = call("sbatch=--ntasks-per-node=2")
    assert "2 with Slurm, 0 to submit" in again
    assert slurm.wait(report) == "COMPLETED"
    table = (copy / "results" / "tables" / "jobs.md").read_text()
    assert "1 of 2 finished" in table
    assert "bad seed 1: not finished: status 'failed'" in table
    plan = call("sbatch=--ntasks-per-node=2", "--dry-run")
    assert "good seed 1: finished" in plan
    assert (
        "\nsbatch --ntasks-per-node=2 --cpus-per-task=2 --nodes=1 slurm/train.sbatch cnn experiment=quickstart" in plan
    )
    assert "bad seed 1: failed; its last job: failed (job" in plan
    assert "1 of 2 finished, 0 with Slurm, 1 to submit" in plan


@pytest.mark.parametrize(
    ("table", "options", "named"),
    [
        ("table3", ["sbatch=--gpus-per-node=a40:16"], "--gpus-per-node=a40:16"),
        ("quickstart", ["sbatch=--partition=none"], "--partition=none"),
        ("table3", ["cluster=one_node_cpu"], "--nodes=32"),  # a rank on each node
    ],
)
def test_what_the_cluster_cannot_give_is_refused_at_submission(
    slurm: Slurm, tmp_path: Path, table: str, options: list[str], named: str
) -> None:
    submit = [sys.executable, "-m", "scripts.reproduce", f"table={table}", "launcher=slurm", f"runs={tmp_path}"]
    done = slurm.call(*submit, *options, check=False)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert slurm.call("squeue", "--noheader").stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_slurm_takes_the_files_of_rows_that_fit_and_refuses_the_others(slurm: Slurm) -> None:
    """The local Slurm claims to have 4 nodes of 8 GPUs."""
    for file in made():
        nodes = int(re.search(r"--nodes=(\d+)", file.read_text())[1])
        done = slurm.call("sbatch", "--test-only", str(file), "seed=2", check=False)
        assert (done.returncode == 0) == (nodes <= 4), (file, done.stderr)


def test_a_second_slurm_and_a_folder_with_other_things_are_refused(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    for state, message in (
        (slurm.environment["STATE"], "is up already"),
        (f"{tmp_path}/new", "runs on this machine"),
        (str(tmp_path), "expected a new or an empty folder"),
    ):
        done = subprocess.run(
            ["slurm/local/up.sh"],
            cwd=ROOT,
            env=slurm.environment | {"STATE": state},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["work"]
