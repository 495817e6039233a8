"""Runs in fp16 whose first scale is too large: what overflows cost, and how such a run is resumed."""

import functools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from common.launch.processes import launch
from common.training.recorder import Recorder
from tests.training.runs import assert_same_run, manifests, rows, summary

FP16 = ["training.precision=fp16", "training.steps=8", "training.checkpoint_every=2", "training.checkpoints_kept=9"]
QUIET = ["logging.every=4", "logging.progress=false", "training.threads=1", "model.width=4", "schedule.warmup=2"]
SIMULATED = ["workers=simulated", "workers.count=3", "training.batch_size=96"]
GOSSIP = [*SIMULATED, "topology=ring", "optimizer=accumadamw", "training.clip=1.0", "training.gradient_accumulation=2"]


@pytest.fixture(autouse=True)
def large_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with a scale that overflows in the first steps and grows every second step without an overflow."""
    start = functools.partialmethod(torch.amp.GradScaler.__init__, init_scale=2.0**20, growth_interval=2)
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", start)


def scales(folder: Path, step: int) -> list[float]:
    (file,) = (folder / "checkpoints" / f"step_{step:08}").glob("*.pt")
    return [worker["scaler"]["scale"] for worker in torch.load(file, weights_only=True)["workers"]]


def test_under_gossip_no_step_is_skipped_and_a_run_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, resumed = tmp_path / "reference", tmp_path / "resumed"
    assert launch("cnn", [*FP16, *QUIET, *GOSSIP, f"run_dir={reference}"]) == 0
    assert (summary(reference)["steps"], summary(reference)["skipped_steps"]) == (8, 0)
    assert all(scale < 2**20 for scale in scales(reference, 2))
    assert all(2**10 < scale < 2**20 for scale in scales(reference, 8))
    assert all(0 < row["grad_norm"] < 10 for row in rows(reference) if row["split"] == "train")
    logged = [row["loss_scale"] for row in rows(reference) if row["split"] == "train"]
    assert logged == [min(scales(reference, step)) for step in (4, 8)]
    shutil.copytree(reference, resumed)
    (resumed / "summary.json").unlink()
    for manifest in manifests(resumed)[:-1]:
        shutil.rmtree(manifest.parent)
    assert launch("cnn", [*FP16, *QUIET, *GOSSIP, f"run_dir={resumed}", "resume=true"]) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert_same_run(resumed, reference)


@pytest.mark.parametrize("workers", [[*SIMULATED, "parallel=allreduce"], ["workers.count=1"]])
def test_where_gradients_are_averaged_all_skip(workers: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert launch("cnn", [*FP16, *QUIET, *workers, "training.clip=1.0", f"run_dir={run}"]) == 0
    assert summary(run)["steps"] == 8
    assert 3 <= summary(run)["skipped_steps"] < 10
    assert len(set(scales(run, 8))) == 1


@pytest.mark.parametrize(("signalled", "code", "status"), [(False, 1, "failed"), (True, 75, "interrupted")])
def test_a_run_that_skips_every_step_ends(
    signalled: bool, code: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder.step

    def step(self: Recorder, committed: bool, *facts: list) -> None:
        record(self, committed, *facts)
        if signalled and self.skipped == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "step", step)
    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", lambda *_: {torch.device("cpu"): torch.tensor(1.0)})
    assert launch("cnn", [*FP16, *QUIET, "workers.count=1", f"run_dir={tmp_path / 'run'}"]) == code
    assert summary(tmp_path / "run")["status"] == status
