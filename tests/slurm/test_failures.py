"""Jobs on a real Slurm that fail: in time, and the log says why."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.elastic.test_processes import trained
from tests.slurm.conftest import TWO_RANKS, Slurm, command_of, processes_with
from tests.slurm.runs import SMALL

pytestmark = pytest.mark.slow  # on a real Slurm


ENDS = {  # of a rank, and what the log says of it
    signal.SIGKILL: r"Signal 9 \(SIGKILL\)|exitcode: -9",
    signal.SIGSTOP: r"rank \d failed:(.|\n)*all 2 ranks must take part(.|\n)*after step \d+|rank \d: gossip step \d+",
}


def test_a_rank_that_dies_or_hangs_fails_the_job_and_the_log_says_why(slurm: Slurm, tmp_path: Path) -> None:
    """Two jobs at once, which mostly wait."""
    long = [*TWO_RANKS, "slurm/train.sbatch", "cnn", *SMALL, "workers.count=2"]
    long += ["training.steps=100000", "parallel.timeout_s=10"]
    jobs = {number: slurm.sbatch(*long, f"run_dir={tmp_path}/{int(number)}") for number in ENDS}
    for number, job in jobs.items():
        slurm.until(trained(tmp_path / f"{int(number)}", 5), job)
        ranks = [pid for pid in processes_with("RANK=1") if f"run_dir={tmp_path}/{int(number)}" in command_of(pid)]
        (last,) = ranks
        os.kill(last, number)
    for number, job in jobs.items():
        assert slurm.wait(job) == "FAILED"
        assert re.search(ENDS[number], slurm.log(job)), slurm.log(job)
        assert "[slurm] failed: srun ended with exit code" in slurm.log(job)
        assert "a node does not answer" not in slurm.log(job)


BAD = [([], "optimizer.learning_rate=1", "optimizer.learning_rate: no such key")]
WITHOUT_CUDA = ["--gpus-per-node=1"], "seed=1", "finds none; training.device=cpu trains without"


def test_a_bad_configuration_fails_at_once(slurm: Slurm, tmp_path: Path) -> None:
    jobs = {}
    for options, override, told in [*BAD, *([] if torch.cuda.is_available() else [WITHOUT_CUDA])]:
        run_dir = f"run_dir={tmp_path}/run_{len(jobs)}"
        jobs[slurm.sbatch(*options, "slurm/train.sbatch", "cnn", override, run_dir)] = told
    for job, told in jobs.items():
        assert slurm.wait(job) == "FAILED"
        assert slurm.log(job).count(told) == 1, slurm.log(job)
