"""Whole tables on a real Slurm, what it refuses, and what its start refuses."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.experiments.definitions import ROOT
from slurm.options import CLUSTERS, SbatchOptions
from tests.slurm.conftest import Slurm
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow  # on a real Slurm

TABLE = """
title: "Jobs"
task: cnn
seeds: [1, 2]
overrides: [experiment=quickstart, training.steps=40, model.width=2, workers.count=2]
rows:
  - {name: good, method: AllReduce, topology: complete, overrides: [parallel=allreduce, optimizer=adam]}
  - {name: bad, method: DAdam, topology: aer, overrides: [topology=aer, optimizer=adam, optimizer.lr=1e30]}
  - {name: other, method: Adam, topology: ring, overrides: [topology=ring, optimizer=adam]}
"""


SWEEP = """
title: "Tuned jobs"
task: cnn
seeds: [1]
overrides: [experiment=quickstart, training.steps=40, model.width=2, workers=simulated, workers.count=2]
columns: [method, validation_loss_mean]
sweep: {quantity: validation_loss, best: lowest, seeds: [7], rates: 3, extensions: 1}
rows:
  - {name: tuned, method: AllReduce, topology: complete, overrides: [parallel=allreduce, optimizer=adam], centre: 1e-4}
"""


def with_table(folder: Path, table: str) -> Path:
    """Return a copy of the repository in which `jobs` is a table: a test does not write to results/definitions."""
    copy = folder / "repository"
    for name in ("cnn", "common", "configs", "slurm", "scripts", "results/definitions", "results/paper"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "results" / "definitions" / "tables" / "jobs.yaml").write_text(table)
    return copy


def test_a_sweep_goes_on_by_itself_until_the_values_are_chosen(slurm: Slurm, tmp_path: Path) -> None:
    """sbatch slurm/sweep.sbatch table=...: an array of trials, the job after it that grows the grid, and the choice."""
    copy = with_table(tmp_path, SWEEP)
    job = slurm.sbatch("slurm/sweep.sbatch", "table=jobs", f"runs={tmp_path}/runs", folder=copy)
    chosen = copy / "results" / "sweeps" / "jobs.yaml"
    slurm.until(chosen.exists, job)
    methods = OmegaConf.load(chosen).methods  # with steps as small as these the highest rate is the best
    assert (methods.tuned.trials, methods.tuned.edge) == (4, "highest")
    trials = {run.parent.name for run in (tmp_path / "runs" / "sweeps" / "jobs" / "tuned").glob("*/seed_7")}
    assert trials == {"lr_5e-05", "lr_0.0001", "lr_0.0002", "lr_0.0004"}
    (after,) = re.findall(r"then: (\d+), which submits the next trials", slurm.log(job))
    log = (tmp_path / "runs" / "sweeps" / "jobs" / "slurm" / f"{after}.log").read_text()
    assert "a method is best at the highest rate: the grid grows" in log
    slurm.until(lambda: slurm.call("squeue", "--noheader").stdout == "", job)


def test_a_part_of_a_table_is_trained_and_the_table_is_built_from_what_did_not_fail(
    slurm: Slurm, tmp_path: Path
) -> None:
    """sbatch slurm/table.sbatch TABLE rows=... seeds=..., then the same from outside of a job."""
    copy = with_table(tmp_path, TABLE)
    part = ["seeds=2", "sbatch=--ntasks-per-node=2", f"runs={tmp_path}/runs"]

    def submit(*arguments: str) -> str:
        """Submit from the copy's root; return the job's id."""
        return slurm.sbatch("--partition=spot", "slurm/table.sbatch", "jobs", *arguments, folder=copy)

    def call(*more: str) -> str:
        command = [sys.executable, "-m", "scripts.reproduce", "table=jobs", "launcher=slurm", "rows=good,bad", *part]
        done = slurm.call(*command, *more, folder=copy, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    wrong = submit("rows=god", *part)
    job = submit("rows=good,bad", *part)
    assert slurm.wait(wrong) == "FAILED"
    assert "error: rows=god: unknown; did you mean 'good'?" in slurm.log(wrong)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    array, report = re.search(r"2 to submit\nsubmitted: (\d+)\nthen: (\d+), which", slurm.log(job)).groups()
    assert slurm.field(array, "Partition") == slurm.field(report, "Partition") == "spot"
    again = call()
    assert "2 with Slurm, 0 to submit" in again
    assert slurm.wait(report) == "COMPLETED"
    table = (copy / "runs" / "report" / "jobs.md").read_text()
    assert "1 of 6 finished" in table
    assert "bad seed 2: not finished: status 'diverged'" in table
    folders = {f"{run.parent.name}/{run.name}" for run in (tmp_path / "runs" / "jobs").glob("*/seed_*")}
    assert folders == {"good/seed_2", "bad/seed_2"}
    plan = call("--dry-run")
    assert "good seed 2: finished" in plan
    assert (
        "\nsbatch --ntasks-per-node=2 --cpus-per-task=2 --nodes=1 slurm/train.sbatch cnn experiment=quickstart" in plan
    )
    assert "bad seed 2: diverged; its last job: failed (job" in plan
    assert "1 of 2 finished, 0 with Slurm, 1 to submit" in plan


def test_what_the_cluster_cannot_give_is_refused_at_submission(slurm: Slurm, tmp_path: Path) -> None:
    submit = [sys.executable, "-m", "scripts.reproduce", "table=quickstart", "launcher=slurm", f"runs={tmp_path}"]
    done = slurm.call(*submit, "sbatch=--partition=none", check=False)
    assert done.returncode == 2
    assert "--partition=none" in done.stderr
    assert done.stderr.count("\n") == 1
    assert slurm.call("squeue", "--noheader").stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_slurm_takes_jobs_that_fit_and_refuses_the_others(slurm: Slurm) -> None:
    """The local Slurm claims to have 4 nodes of 8 GPUs."""
    for file in sorted((ROOT / "slurm").glob("*.sbatch")):
        slurm.call("sbatch", "--test-only", str(file))
    for cluster in sorted(file.name for file in CLUSTERS.iterdir()):
        for ranks in (8, 64):
            options = SbatchOptions.load(cluster).for_ranks(ranks)
            nodes = int(re.search(r"--nodes=(\d+)", " ".join(options))[1])
            done = slurm.call("sbatch", "--test-only", *options, "slurm/train.sbatch", check=False)
            assert (done.returncode == 0) == (nodes <= 4), (cluster, options, done.stderr)


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
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 1
        assert message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["work"]
