"""Jobs on a real Slurm: several nodes, requeue, scancel."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.record import read_status
from slurm import starts
from slurm.options import CLUSTERS
from tests.elastic.test_processes import trained
from tests.slurm.conftest import FOUR_GPUS, TWO_RANKS, Slurm
from tests.slurm.runs import MIDDLE, RUN
from tests.training.runs import rows

pytestmark = pytest.mark.slow  # on a real Slurm


TWO_HOSTS = ["workers.count=2", "workers.per_host=1"]


@pytest.fixture(scope="module")
def uninterrupted(local_slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of RUN in local processes, without Slurm."""
    run = tmp_path_factory.mktemp("uninterrupted")
    local_slurm.call(sys.executable, "-m", "cnn.train", *RUN, *TWO_HOSTS, f"run_dir={run}")
    return rows(run)


def test_a_row_trains_on_a_part_of_its_cluster(slurm: Slurm, tmp_path: Path) -> None:
    """With all other options of the preset, and values that a shell would split or expand."""
    run = tmp_path / "a run [1]"
    preset = [line for line in (CLUSTERS / "t4_4x8").read_text().splitlines() if not line.startswith("#")]
    images = [f"~data.{key}" for key in ("train_crop", "scale", "flip", "resize", "validation_crop")]
    size = ["data=digits", "model=resnet_digits", *images, "~model.channels_last"]  # the recipe's keys for ImageNet
    size += ["model.width=2", "workers.count=4", "workers.per_host=2", "training.batch_size=128", "training.device=cpu"]
    size += ["training.precision=fp32", "training.compile=false", "training.epochs=2", "schedule.warmup=1"]
    own = ["seed=2", "optimizer.betas=[0.9, 0.95]", "name='two words, $HOME and *'", f"run_dir='{run}'"]
    few = "--export=PATH,HOME,VENV,SLURM_CONF,OMP_NUM_THREADS"  # srun would pass on only these, too
    row = ["slurm/train.sbatch", "cnn", "experiment=table3/accumadam_aer"]
    job = slurm.sbatch(*preset, *FOUR_GPUS, few, *row, *size, *own)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    config = OmegaConf.load(run / "config.yaml")
    assert (config.name, config.optimizer.betas) == ("two words, $HOME and *", [0.9, 0.95])
    assert (config.workers.count, config.optimizer.name, config.training.threads) == (4, "accumadam", 1)
    assert "--cpus-per-task=32 --gpus-per-node=2" in slurm.log(job)
    assert slurm.field(job, "CpusPerTres") == "gres:gpu:16"
    assert read_status(run) == "finished"
    assert (run / "slurm" / f"{job}.log").read_text() == slurm.log(job)  # beside the run


def time_limit(slurm: Slurm, job: str, start: int) -> None:
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@120 sends before it
    slurm.until(lambda: "back to the queue" in slurm.log(job), job)
    begins(slurm, job, start)


def preemption(slurm: Slurm, job: str, start: int) -> None:
    other = slurm.sbatch("--partition=main", "--nodes=4", "--exclusive", "--wrap=true")
    assert slurm.wait(other) == "COMPLETED"
    assert "DUE TO PREEMPTION" in slurm.log(job)
    begins(slurm, job, start)


def crash(slurm: Slurm, job: str, start: int) -> None:
    node = slurm.call("scontrol", "show", "hostnames", slurm.field(job, "NodeList")).stdout.split()[-1]
    slurm.crash(node)
    begins(slurm, job, start)
    slurm.boot(node)  # not earlier: Slurm would repeat there what it could not tell the job's first start, to end
    assert "DUE TO NODE FAILURE" in slurm.log(job)


def begins(slurm: Slurm, job: str, start: int) -> None:
    """Wait for the job's second start, or a later one."""
    slurm.until(lambda: f"start {start}" in slurm.log(job), job)


def test_an_interrupted_run_goes_on_and_gives_the_metrics_of_an_uninterrupted_one(
    slurm: Slurm, tmp_path: Path, uninterrupted
) -> None:
    """A job reaches its time limit, later is preempted, and later loses a node."""
    run = tmp_path / "run"
    slurm.kill_wait(300)  # a slow machine saves, too
    command = ["--partition=spot", *TWO_RANKS, "slurm/train.sbatch", "cnn", *RUN, *TWO_HOSTS, f"run_dir={run}"]
    job = slurm.sbatch(*command)
    slurm.until(trained(run, MIDDLE), job)
    time_limit(slurm, job, start=2)
    slurm.until(lambda: slurm.log(job).count("resumed at step") == 1 and trained(run, 2 * MIDDLE)(), job)
    preemption(slurm, job, start=3)
    assert "Traceback" not in slurm.log(job)
    slurm.until(lambda: slurm.log(job).count("resumed at step") == 2 and trained(run, 3 * MIDDLE)(), job)
    slurm.kill_wait(30)
    crash(slurm, job, start=4)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert rows(run) == uninterrupted  # where the ranks live changes nothing, either
    assert len(json.loads((run / "environment.json").read_text())["resumed"]) == 3
    all_starts = starts.read(run)
    assert [start.job for start in all_starts] == [job] * 4
    *ends, lost, last = [start.end for start in all_starts]
    assert (ends, last) == (["saved", "stopped"], "finished")
    assert lost in ("node failure", None)  # None: Slurm killed the job before it could write
    _, second, third, fourth = (start.step for start in all_starts)
    assert f"resumed at step {second}" in slurm.log(job)
    for number, step in enumerate((second, third), start=1):
        assert step >= number * MIDDLE  # it was saved
    assert fourth == third or (fourth > third and fourth % 20 == 0)  # from the last checkpoint, whoever wrote it
