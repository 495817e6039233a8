"""Real workers that are killed: the others go on, new ones join, and the result is that of a replay, bit for bit."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.training.compose import compose_config
from common.training.launch import launch
from tests.distributed.comparison import assert_same
from tests.distributed.processes import PRELOAD
from tests.training.replay import membership_rows, replay
from tests.training.test_resume import rows, wait_for

pytestmark = pytest.mark.timeout(300)

RUN = ["model.width=4", "training.threads=1", "evaluation.every=1000", "logging.progress=false", "logging.every=4"]
RUN += ["parallel.bucket_mb=0.002", "parallel.timeout_s=30", "training.checkpoint_every=1000", "schedule.warmup=5"]
RUN += ["topology=ring", "parallel.transport=send_recv", "optimizer=accumadamw", "elastic.min_workers=2"]


def train(folder: Path, disturb: Callable[[], None], *arguments: str) -> int:
    """Run in this process's agent while a thread disturbs the workers; return the exit code."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    code = launch("cnn", [*RUN, f"run_dir={folder}", *arguments])
    thread.join(10)
    assert not multiprocessing.active_children()
    return code


def kill(number: int) -> None:
    """Kill the worker of that number."""
    (process,) = [child for child in multiprocessing.active_children() if child.name == f"worker {number}"]
    os.kill(process.pid or 0, signal.SIGKILL)


def trained(folder: Path, step: int) -> Callable[[], bool]:
    """Return a function that says whether the run has recorded that step."""
    return lambda: (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(folder))


def joined(folder: Path, times: int) -> Callable[[], bool]:
    return lambda: sum(bool(row["joined"]) for row in membership_rows(folder)) == times


def assert_equals_replay(folder: Path, *arguments: str) -> None:
    """Compare the last checkpoint with a replay: parameters, buffers and optimizer state."""
    config = compose_config("cnn", [*RUN, *arguments])
    (saved,) = (folder / "checkpoints").glob("step_*")
    replicas = replay(config, folder)
    for rank, member in enumerate(sorted(replicas)):
        state = torch.load(saved / f"rank_{rank}.pt", weights_only=True)
        assert state["members"] == sorted(replicas)
        (worker,) = state["workers"]
        assert worker["clock"] == config.training.steps
        for what, expected in (
            ("model", replicas[member].module.state_dict()),
            ("optimizer", flat(replicas[member].optimizer.state_dict()["state"])),
        ):
            got = worker[what] if what == "model" else flat(worker[what]["state"])
            assert_same(arrays(got), arrays(expected), f"worker {member} {what}")


def flat(state: dict) -> dict:
    return {f"{index} {name}": torch.as_tensor(value) for index, s in state.items() for name, value in s.items()}


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_survivors_go_on_as_in_a_replay(tmp_path: Path) -> None:
    """The first worker, which writes the records, dies."""
    folder, arguments = tmp_path / "run", ["workers.count=3", "training.batch_size=48", "training.steps=40"]

    def disturb() -> None:
        wait_for(trained(folder, 12), 120)
        kill(0)

    assert train(folder, disturb, *arguments) == 0
    (row,) = membership_rows(folder)
    assert (row["members"], row["left"], row["membership"]) == ([1, 2], [0], 1)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert_equals_replay(folder, *arguments)
