"""Jobs on a real Slurm: several nodes, requeue, scancel, failures, whole tables."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.report.registry import ROOT
from slurm.rows import FOLDER
from tests.slurm.conftest import FOUR_GPUS, FOUR_RANKS, Slurm, command_of

SMALL = ["experiment=quickstart", "model.width=2", "training.checkpoint_every=20", "logging.every=5"]
# A run that takes long enough to be interrupted in the middle.
RUN = [*SMALL, "training.steps=300", "topology=aer", "seed=3"]
MIDDLE = 45


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock on the wall."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time_")} for row in rows]


def status(run: Path) -> str | None:
    file = run / "summary.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def reached(run: Path, step: int) -> bool:
    file = run / "metrics.jsonl"
    return file.exists() and any(row["step"] >= step for row in metrics(run))


def small_gpt2(folder: Path) -> list[str]:
    """Overrides of a tiny GPT-2 on a text of its own."""
    (folder / "text").mkdir()
    documents = [f"number {number} of some documents\n" for number in range(400)]
    (folder / "text" / "a.txt").write_text("<|endoftext|>\n".join(documents))
    prepare = [f"output={folder}/data", f"source={folder}/text", "tokenizer=bytes", "validation_fraction=0.2"]
    subprocess.run([sys.executable, "-m", "gpt2.prepare", *prepare], cwd=ROOT, check=True, timeout=200)
    size = ["model=gpt2_proxy", "model.layers=1", "model.width=16", "model.heads=2", "model.vocabulary=257"]
    data = ["data=tokens", f"data.folder={folder}/data", "model.context=16", "training.batch_size=8"]
    return [*size, *data, "training.steps=6", "schedule.warmup=2", "evaluation.batch_size=4"]


def small_transformer(folder: Path) -> list[str]:
    """Overrides of a tiny Transformer on few names of numbers; skipped without fairseq, which writes its data."""
    pytest.importorskip("num2words")
    if find_spec("fairseq") is None:
        pytest.skip("fairseq is not installed (see `make env`)")
    layers = ["model.encoder_layers=1", "model.decoder_layers=1"]
    size = ["model=transformer_tiny", "model.width=16", "model.hidden=32", "model.heads=2", *layers]
    data = [f"data.path={folder}/data", "data.numbers=1000", "data.held_out=50", "data.train_lines=300"]
    few = ["data.held_out_lines=20", "data.merges=30", "training.batch_size=240", "evaluation.batch_size=240"]
    return [*size, *data, *few, "training.steps=6", "schedule.warmup=2"]


@pytest.fixture(scope="module")
def uninterrupted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of RUN in local processes, without Slurm."""
    run = tmp_path_factory.mktemp("uninterrupted")
    slurm.call(sys.executable, "-m", "cnn.train", *RUN, "workers.count=4", "workers.per_host=2", f"run_dir={run}")
    return metrics(run)


@pytest.mark.parametrize(
    ("task", "overrides", "options"),
    [("gpt2", small_gpt2, FOUR_RANKS), ("transformer", small_transformer, FOUR_GPUS)],
)
def test_every_task_runs_on_two_nodes(slurm: Slurm, tmp_path: Path, task: str, overrides, options) -> None:
    run = tmp_path / "run"
    chosen = [*overrides(tmp_path), "seed=5", f"run_dir={run}"]
    job = slurm.sbatch(*options, "slurm/train.sbatch", task, *chosen)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    config = OmegaConf.load(run / "config.yaml")
    assert (config.task, config.seed, config.workers.count) == (task, 5, 4)
    assert status(run) == "finished"


def test_two_nodes_of_two_ranks_with_overrides(slurm: Slurm, tmp_path: Path, uninterrupted) -> None:
    run = tmp_path / "run"
    job = slurm.sbatch(*FOUR_RANKS, "slurm/train.sbatch", "cnn", *RUN, f"run_dir={run}")
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    config = OmegaConf.load(run / "config.yaml")
    assert (config.workers.count, config.workers.per_host) == (4, 2)
    assert (config.topology.name, config.seed) == ("aer", 3)
    log = (run / "slurm" / f"{job}.log").read_text()  # beside the run
    assert "step 300/300" in log
    assert log == slurm.log(job)
    assert metrics(run) == uninterrupted  # where the ranks live changes nothing


def time_limit(slurm: Slurm, job: str) -> None:
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@120 sends before it
    slurm.until(lambda: "back to the queue" in slurm.log(job), job)


def preemption(slurm: Slurm, job: str) -> None:
    other = slurm.sbatch("--partition=main", "--nodes=4", "--exclusive", "--wrap=true")
    assert slurm.wait(other) == "COMPLETED"
    assert "DUE TO PREEMPTION" in slurm.log(job)


def crash(slurm: Slurm, job: str) -> None:
    node = slurm.call("scontrol", "show", "hostnames", slurm.field(job, "NodeList")).stdout.split()[-1]
    slurm.crash(node)
    slurm.until(lambda: "start 2" in slurm.log(job), job)
    slurm.boot(node)  # not earlier: Slurm would repeat there what it could not tell the job's first start, to end
    assert "DUE TO NODE FAILURE" in slurm.log(job)


@pytest.mark.parametrize("interrupt", [time_limit, preemption, crash])
def test_an_interrupted_job_is_requeued_and_gives_the_metrics_of_an_uninterrupted_one(
    slurm: Slurm, tmp_path: Path, uninterrupted, interrupt
) -> None:
    run = tmp_path / "run"
    job = slurm.sbatch("--partition=spot", *FOUR_RANKS, "slurm/train.sbatch", "cnn", *RUN, f"run_dir={run}")
    slurm.until(lambda: reached(run, MIDDLE), job)
    interrupt(slurm, job)
    slurm.until(lambda: "start 2" in slurm.log(job), job)
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert metrics(run) == uninterrupted
    assert len(json.loads((run / "environment.json").read_text())["resumed"]) == 1
    starts = [json.loads(line) for line in (run / "slurm" / "starts.jsonl").read_text().splitlines()]
    assert [start["job"] for start in starts] == [job, job]
    if interrupt is crash:
        assert starts[1]["step"] % 20 == 0  # from the last checkpoint
        assert starts[1]["step"] > 0
    else:
        assert starts[1]["step"] >= MIDDLE  # it was saved
        assert "Traceback" not in slurm.log(job)


def test_scancel_leaves_a_checkpoint_that_the_same_command_continues(
    slurm: Slurm, tmp_path: Path, uninterrupted
) -> None:
    run = tmp_path / "run"
    command = [*FOUR_RANKS, "slurm/train.sbatch", "cnn", *RUN, f"run_dir={run}"]
    job = slurm.sbatch(*command)
    slurm.until(lambda: reached(run, MIDDLE), job)
    slurm.call("scancel", job)
    again = slurm.sbatch(*command)  # at once: it waits until the first job has saved and ended
    assert slurm.wait(again) == "COMPLETED", slurm.log(again)
    assert slurm.state(job) == "CANCELLED"
    saved = re.search(r"resumed at step (\d+)", slurm.log(again))
    assert saved
    assert int(saved[1]) >= MIDDLE
    assert metrics(run) == uninterrupted


def test_a_rank_that_dies_fails_the_job_and_the_log_says_why(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = [*SMALL, "training.steps=100000", "parallel.timeout_s=30", f"run_dir={run}"]
    job = slurm.sbatch(*FOUR_RANKS, "slurm/train.sbatch", "cnn", *long)
    slurm.until(lambda: reached(run, 5), job)
    ranks = subprocess.run(
        ["pgrep", "-f", f"slurm.rank.*run_dir={run} resume"], capture_output=True, text=True, check=True
    )
    workers = [pid for pid in map(int, ranks.stdout.split()) if "torch.distributed.run" not in command_of(pid)]
    os.kill(workers[-1], signal.SIGKILL)
    assert slurm.wait(job, timeout_s=100) == "FAILED"
    assert "Signal 9 (SIGKILL)" in slurm.log(job) or "exitcode: -9" in slurm.log(job)
    assert "[slurm] failed: srun ended with exit code" in slurm.log(job)


def test_a_bad_configuration_fails_at_once_with_one_line(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sbatch("slurm/train.sbatch", "cnn", "optimizer.learning_rate=1", f"run_dir={tmp_path}/run")
    assert slurm.wait(job) == "FAILED"
    assert "learning_rate" in slurm.log(job)
    assert "Traceback" not in slurm.log(job)


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
    copy = tmp_path / "repository"  # a table is a file in configs/table, which a test does not write to
    for name in ("cnn", "common", "configs", "slurm", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "configs" / "table" / "jobs.yaml").write_text(TABLE)
    submit = [sys.executable, "-m", "scripts.reproduce", "table=jobs", "launcher=slurm", f"runs={tmp_path}/runs"]

    def call(*more: str) -> str:
        done = subprocess.run(
            [*submit, *more], cwd=copy, env=slurm.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    answer = call("sbatch=--ntasks-per-node=2")
    assert "2 to submit" in answer
    report = answer.split("; then ")[1].split(",")[0]
    again = call("sbatch=--ntasks-per-node=2")
    assert "2 with Slurm, 0 to submit" in again
    assert slurm.wait(report) == "COMPLETED"
    table = (copy / "results" / "tables" / "jobs.md").read_text()
    assert "1 of 2 finished" in table
    assert "bad seed 1: not finished: status 'failed'" in table
    plan = call("sbatch=--ntasks-per-node=2", "--dry-run")
    assert "good seed 1: finished" in plan
    assert "\nsbatch --ntasks-per-node=2 --nodes=1 slurm/train.sbatch cnn experiment=quickstart" in plan
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
    for file in FOLDER.glob("*/*.sbatch"):
        nodes = int(re.search(r"--nodes=(\d+)", file.read_text())[1])
        done = slurm.call("sbatch", "--test-only", str(file), "seed=2", check=False)
        assert (done.returncode == 0) == (nodes <= 4), (file, done.stderr)


def test_a_second_slurm_is_refused(slurm: Slurm) -> None:
    for state, message in ((slurm.environment["STATE"], "is up already"), ("/tmp/other-slurm", "runs on this machine")):
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
    assert not Path("/tmp/other-slurm").exists()
