"""A job on a real Slurm that loses nodes and goes on."""

from pathlib import Path

import pytest

from common.record import read_status
from slurm import starts
from tests.elastic.test_processes import ENDLESS, PACED, RUN, assert_equals_replay, joined, trained
from tests.slurm.conftest import NODES, Slurm, command_of, parent_of, processes_with
from tests.training.replay import membership_rows

pytestmark = pytest.mark.slow  # on a real Slurm

ELASTIC = [*RUN, "elastic.restarts=2", "training.batch_size=96", ENDLESS, "workers.count=3"]


def trains(node: str) -> bool:
    """Whether a worker runs there: on a spare node, only the server that workers are forked from does."""
    servers = [pid for pid in processes_with(f"SLURMD_NODENAME={node}") if "forkserver" in command_of(pid)]
    return any(parent_of(pid) in servers for pid in servers)


def test_a_job_that_loses_nodes_goes_on_and_equals_a_replay(slurm: Slurm, tmp_path: Path) -> None:
    """A node that trains crashes and the spare one takes its place; then another is set down. Node 1's agent leads."""
    run = tmp_path / "run"
    options = ["--no-kill", "--nodes=4", "--ntasks-per-node=1"]
    job = slurm.sbatch(*options, "slurm/train.sbatch", "cnn", *ELASTIC, PACED, f"run_dir={run}")
    slurm.until(trained(run, 8), job)
    crashes, is_set_down = filter(trains, NODES[1:])
    slurm.crash(crashes)
    slurm.until(joined(run, 1), job)
    slurm.call("scontrol", "update", f"nodename={is_set_down}", "state=down", "reason=test")
    slurm.until(lambda: len(membership_rows(run)[-1]["members"]) == 2, job)
    slurm.until(trained(run, membership_rows(run)[-1]["step"] + 8), job)
    slurm.call("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    slurm.until(lambda: read_status(run) == "interrupted", job)
    assert [start.job for start in starts.read(run)] == [job]
    assert_equals_replay(run, *ELASTIC)
