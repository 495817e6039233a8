"""Jobs on a real Slurm: several nodes, requeue, scancel."""

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.experiments.definitions import ROOT
from slurm import starts
from slurm.options import CLUSTERS
from tests.slurm.conftest import FOUR_GPUS, FOUR_RANKS, Slurm
from tests.slurm.runs import MIDDLE, RUN, reached, status
from tests.training.runs import rows
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow  # on a real Slurm


def small_gpt2(folder: Path) -> list[str]:
    """Overrides of a tiny GPT-2 on a text of its own."""
    (folder / "text").mkdir()
    documents = [f"number {number} of some documents\n" for number in range(400)]
    (folder / "text" / "a.txt").write_text("<|endoftext|>\n".join(documents))
    prepare = [f"output={folder}/data", f"source={folder}/text", "tokenizer=bytes", "validation_fraction=0.2"]
    subprocess.run([sys.executable, "-m", "gpt2.prepare", *prepare], cwd=ROOT, check=True, timeout=LIMIT_S)
    size = ["model=gpt2_proxy", "model.layers=1", "model.width=16", "model.heads=2", "model.vocabulary=257"]
    data = ["data=tokens", f"data.folder={folder}/data", "model.context=16", "training.batch_size=8"]
    return [*size, *data, "training.steps=6", "schedule.warmup=2", "evaluation.batch_size=4"]


def small_transformer(folder: Path) -> list[str]:
    """Overrides of a tiny Transformer on few names of numbers."""
    layers = ["model.encoder_layers=1", "model.decoder_layers=1"]
    size = ["model=transformer_tiny", "model.width=16", "model.hidden=32", "model.heads=2", *layers]
    data = [f"data.path={folder}/data", "data.numbers=1000", "data.held_out=50", "data.train_lines=300"]
    few = ["data.held_out_lines=20", "data.merges=30", "training.batch_size=240", "evaluation.batch_size=240"]
    return [*size, *data, *few, "training.steps=6", "schedule.warmup=2"]


@pytest.fixture(scope="module")
def uninterrupted(local_slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of RUN in local processes, without Slurm."""
    run = tmp_path_factory.mktemp("uninterrupted")
    local_slurm.call(sys.executable, "-m", "cnn.train", *RUN, "workers.count=4", "workers.per_host=2", f"run_dir={run}")
    return rows(run)


def test_every_task_runs_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """At once; the Transformer where there is fairseq, which writes its data."""
    two_gpus = ("--nodes=2", "--gpus-per-node=1")  # one means one rank
    tasks = {"gpt2": (small_gpt2, FOUR_RANKS, 2), "transformer": (small_transformer, two_gpus, 1)}
    if find_spec("fairseq") is None or find_spec("num2words") is None:
        del tasks["transformer"]
    jobs = {}
    for task, (overrides, options, _) in tasks.items():
        (tmp_path / task).mkdir()
        chosen = [*overrides(tmp_path / task), "seed=5", "training.device=cpu", f"run_dir={tmp_path}/{task}/run"]
        jobs[task] = slurm.sbatch(*options, "slurm/train.sbatch", task, *chosen)
    for task, job in jobs.items():
        run = tmp_path / task / "run"
        assert slurm.wait(job) == "COMPLETED", slurm.log(job)
        config = OmegaConf.load(run / "config.yaml")
        per_host = tasks[task][2]
        assert (config.task, config.seed, config.workers.count, config.workers.per_host) == (
            task, 5, 2 * per_host, per_host
        )  # fmt: skip
        assert status(run) == "finished"
        log = (run / "slurm" / f"{job}.log").read_text()  # beside the run
        assert "step 6/6" in log
        assert log == slurm.log(job)


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


def test_a_benchmark_measures_the_nodes_of_its_job(slurm: Slurm, tmp_path: Path) -> None:
    small = ["payload_mb=2", "steps=2", "blocks=2", "compute_ms=40", "methods=allreduce,decent_aer"]
    options = [*FOUR_RANKS, "--gpus-per-node=0", "--cpus-per-gpu=1"]
    job = slurm.sbatch(*options, "slurm/figure6.sbatch", *small, f"output={tmp_path}")
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    found = list(csv.DictReader((tmp_path / "scaling.csv").open()))
    assert [row["topology"] for row in found] == ["complete", "aer"]
    assert {(row["workers"], row["hosts"], row["ranks_per_host"]) for row in found} == {("4", "2", "2")}


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
    """A job is cancelled; the next one reaches its time limit, later is preempted, and later loses a node."""
    run = tmp_path / "run"
    slurm.kill_wait(300)  # a slow machine saves, too
    command = ["--partition=spot", *FOUR_RANKS, "slurm/train.sbatch", "cnn", *RUN, f"run_dir={run}"]
    cancelled = slurm.sbatch(*command)
    slurm.until(lambda: reached(run, MIDDLE), cancelled)
    slurm.call("scancel", cancelled)
    job = slurm.sbatch(*command)  # at once: it waits until the first job has saved and ended
    slurm.until(lambda: reached(run, 2 * MIDDLE), job)
    time_limit(slurm, job, start=2)
    slurm.until(lambda: reached(run, 3 * MIDDLE), job)
    preemption(slurm, job, start=3)
    assert "Traceback" not in slurm.log(job)
    slurm.until(lambda: reached(run, 4 * MIDDLE), job)
    slurm.kill_wait(30)
    crash(slurm, job, start=4)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert slurm.state(cancelled) == "CANCELLED"
    assert rows(run) == uninterrupted  # where the ranks live changes nothing, either
    assert len(json.loads((run / "environment.json").read_text())["resumed"]) == 4
    all_starts = starts.read(run)
    assert [start.job for start in all_starts] == [cancelled, *[job] * 4]
    assert [start.end for start in all_starts] == ["stopped", "saved", "stopped", "node failure", "finished"]
    _, second, third, fourth, fifth = (start.step for start in all_starts)
    assert f"resumed at step {second}" in slurm.log(job)
    for number, step in enumerate((second, third, fourth), start=1):
        assert step >= number * MIDDLE  # it was saved
    assert fifth == fourth or (fifth > fourth and fifth % 20 == 0)  # from the last checkpoint, whoever wrote it
