"""Real workers that are killed: the others go on, new ones join, and the result is that of a replay, bit for bit."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config.config import ConfigError
from common.config.elastic import ranks_of
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.parallel.anchors import with_layout
from tests.distributed.comparison import assert_same
from tests.distributed.processes import PRELOAD
from tests.training.replay import membership_rows, replay
from tests.training.runs import rows, summary
from tests.waiting import wait_for

RUN = ["model.width=4", "training.threads=1", "evaluation.every=1000", "logging.progress=false", "logging.every=4"]
RUN += ["parallel.bucket_mb=0.002", "parallel.timeout_s=30", "training.checkpoint_every=1000000", "schedule.warmup=5"]
RUN += ["topology=ring", "parallel.transport=send_recv", "optimizer=accumadamw", "elastic.min_workers=2"]
PACED = "task=tests.training.paced"
ENDLESS = "training.steps=1000000"  # the test stops it


def train(folder: Path, disturb: Callable[[], None], *arguments: str) -> int:
    """Run in this process's agent while a thread disturbs the workers; return the exit code."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    code = launch("cnn", [*RUN, PACED, f"run_dir={folder}", *arguments])
    thread.join(10)
    assert not multiprocessing.active_children()
    return code


def kill(number: int) -> None:
    """Kill the process of that rank."""
    (process,) = [child for child in multiprocessing.active_children() if child.name == f"rank {number}"]
    os.kill(process.pid or 0, signal.SIGKILL)


def replace(folder: Path, number: int) -> None:
    """Kill a process soon after the begin, and stop the run a few steps after a new one has joined."""
    wait_for(trained(folder, 8))
    kill(number)
    wait_for(joined(folder, 1))  # perhaps before the others went on
    wait_for(trained(folder, membership_rows(folder)[-1]["step"] + 8))
    os.kill(os.getpid(), signal.SIGTERM)


def trained(folder: Path, step: int) -> Callable[[], bool]:
    """Return a function that says whether the run has recorded that step."""
    return lambda: (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(folder))


def joined(folder: Path, times: int) -> Callable[[], bool]:
    return lambda: sum(bool(row["joined"]) for row in membership_rows(folder)) == times


def assert_equals_replay(folder: Path, *arguments: str) -> None:
    """Compare the last checkpoint with a replay: parameters, buffers and optimizer state."""
    config = compose_config("cnn", [*RUN, *arguments])
    (saved,) = (folder / "checkpoints").glob("step_*")
    steps = int(saved.name.removeprefix("step_"))
    replicas = replay(config, folder, steps)
    for rank, member in enumerate(ranks_of(tuple(sorted(replicas)), config.ranks_per_worker)):
        member //= config.ranks_per_worker
        state = torch.load(saved / f"rank_{rank}.pt", weights_only=True)
        assert state["members"] == sorted(replicas)
        (worker,) = state["workers"]
        assert worker["clock"] == steps
        for what, expected in (
            ("model", replicas[member].module.state_dict()),
            ("optimizer", flat(replicas[member].optimizer.state_dict()["state"])),
        ):
            got = worker[what] if what == "model" else flat(worker[what]["state"])
            assert_same(arrays(got), arrays(expected), f"worker {member} {what}")
        communication = with_layout(replicas[member].anchors.state, [replicas[member].vector])
        assert_same(arrays(worker["communication"]), arrays(communication), f"worker {member} communication")


def flat(state: dict) -> dict:
    return {f"{index} {name}": torch.as_tensor(value) for index, s in state.items() for name, value in s.items()}


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_survivors_go_on_as_in_a_replay(groups: str, tmp_path: Path) -> None:
    """The first worker, which writes the records, dies; the others share its part of the global batch."""
    folder, arguments = tmp_path / "run", ["workers.count=3", "training.batch_size=48", "training.steps=16"]
    arguments += ["elastic.keep=global_batch", f"elastic.groups={groups}"]

    def disturb() -> None:
        wait_for(trained(folder, 4))
        kill(0)

    assert train(folder, disturb, *arguments) == 0
    (row,) = membership_rows(folder)
    assert (row["members"], row["left"], row["membership"]) == ([1, 2], [0], 1)
    assert summary(folder)["status"] == "finished"
    assert_equals_replay(folder, *arguments)


@pytest.mark.parametrize(("lost", "memberships"), [(0, [[1, 2]]), (1, [])])
def test_another_worker_writes_the_summary_only_if_the_first_can_not(
    lost: int, memberships: list[list[int]], tmp_path: Path
) -> None:
    folder, arguments = tmp_path / "run", ["workers.count=3", "training.batch_size=48", "training.steps=8"]

    def disturb() -> None:
        wait_for((folder / "finishing").exists)
        kill(lost)

    assert train(folder, disturb, *arguments, "task=tests.training.slow_summary") == 0
    assert summary(folder)["status"] == "finished"
    assert [row["members"] for row in membership_rows(folder)] == memberships


@pytest.mark.slow
def test_a_worker_that_loses_a_rank_is_lost_as_a_whole(groups: str, tmp_path: Path) -> None:
    """Three workers of two ranks. The ranks of those that are left go on alike."""
    folder, arguments = tmp_path / "run", ["workers.count=3", "training.batch_size=48", ENDLESS]
    arguments += ["parallel.ranks_per_worker=2", "model.norm=group", f"elastic.groups={groups}"]
    assert train(folder, lambda: replace(folder, 3), "elastic.restarts=1", *arguments) == 75
    assert [row["left"] for row in membership_rows(folder) if row["left"]] == [[1]]
    assert_equals_replay(folder, *arguments)


GOSSIP = {
    "local steps": [
        *("parallel.local_steps=6", "parallel.merge_after=3", "parallel.fragments=2"),
        *("parallel.outer.lr=0.3", "parallel.outer.momentum=0.9"),
    ],
    "mixed momentum": ["parallel.order=atc", "optimizer=dmsgd", "optimizer.lr=0.05"],
    "push-sum": ["parallel=sgp", "topology=file", "+topology.directed=true", "+topology.weights=push_sum"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", GOSSIP)
def test_a_method_goes_on_as_in_a_replay(method: str, groups: str, tmp_path: Path) -> None:
    """A worker dies and is replaced: it gets anchors and momenta, too."""
    (tmp_path / "edges").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    graph = [f"topology.path={tmp_path / 'edges'}"] if method == "push-sum" else []
    folder = tmp_path / "run"
    arguments = ["workers.count=4", "training.batch_size=64", ENDLESS, *GOSSIP[method], *graph]
    arguments.append(f"elastic.groups={groups}")
    assert train(folder, lambda: replace(folder, 2), "elastic.restarts=1", *arguments) == 75
    assert membership_rows(folder)[-1]["members"] == [0, 1, 2, 3]
    assert_equals_replay(folder, *arguments)


@pytest.mark.slow
def test_a_minority_saves_and_the_run_goes_on_from_there(groups: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["workers.count=3", "training.batch_size=48", "training.steps=40", f"elastic.groups={groups}"]

    def disturb() -> None:
        wait_for(trained(folder, 8))
        kill(0)
        wait_for(lambda: len(membership_rows(folder)) == 1)
        kill(1)

    assert train(folder, disturb, *arguments) == 75
    assert summary(folder)["status"] == "interrupted"
    left = membership_rows(folder)[-1]["members"]
    assert left == [2]
    assert train(folder, lambda: None, "resume=true", *arguments) == 0
    assert membership_rows(folder)[-1]["members"] == [0, 1, 2]
    assert rows(folder)[-1]["step"] == 40


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=simulated"], "elastic.min_workers=2 with workers=simulated: expected workers=processes"),
        (
            ["parallel=allreduce", "topology=complete"],
            "elastic.min_workers=2 with parallel=allreduce: expected a method that gossips",
        ),
        (["training.precision=fp16"], "elastic.min_workers=2 with training.precision=fp16"),
        (["parallel.ranks_per_worker=2", "parallel.shard=true"], "elastic.min_workers=2 with parallel.shard=true"),
        (["elastic.min_workers=5"], "elastic.min_workers=5: expected at most the number of workers, 4"),
        (["elastic.min_workers=null", "elastic.restarts=1"], "elastic.restarts=1 with elastic.min_workers=null"),
    ],
)
def test_what_cannot_outlive_a_worker_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("cnn", [*(text for text in RUN if "transport" not in text), "workers.count=4", *overrides])
    assert message in str(caught.value)


def test_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert launch("cnn", [*RUN, "workers.count=4"]) == 2
    assert "elastic.min_workers=2 under torchrun" in capsys.readouterr().err
