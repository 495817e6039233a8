"""A rank that skips, repeats or loses something is named on all ranks; nobody mixes messages of other rounds."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.optim.flat_state import FlatState
from common.parallel.collectives import PeerError
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, Training, real, snapshot

BASE = Scenario(topology="ring", optimizer="momentum", options={"timeout_s": 20})
SHORT = replace(BASE, options={"timeout_s": 2})
OPERATIONS: dict[str, Callable[[Any], object]] = {
    "averaged()": lambda model: model.averaged().__enter__(),
    "average_()": lambda model: model.average_(),
    "consensus_distance()": lambda model: model.consensus_distance(),
    "drain()": lambda model: model.drain(),
    "load_state_dict()": lambda model: model.load_state_dict(model.state_dict()),
    "load_clock(3)": lambda model: model.load_clock(3),
    "load_communication_state()": lambda model: model.load_communication_state({}),
    "close()": lambda model: model.close(),
}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(PeerError) as error:
        call()
    return str(error.value)


def skipping(rank: int, n: int, method: str) -> dict[str, str]:
    """Rank 1 skips its last step; all-reduces in groups know no rounds."""
    training = real(rank, replace(BASE, topology="complete", method=method)).run(range(2))
    training.backward(2)
    if rank != 1:
        training.update()
    # Loading communication state is collective only under gossip.
    names = [name for name in OPERATIONS if method != "allreduce" or "communication" not in name]
    said = {name: error_of(lambda name=name: OPERATIONS[name](training.model)) for name in names}
    assert not training.model._connected  # closed all the same
    assert not training.optimizer._optimizer_step_pre_hooks
    return said


@pytest.mark.parametrize("method", ["decentralized", "allreduce"])
def test_a_skipped_step_is_named_by_every_collective_method(method: str) -> None:
    for said in run_processes(skipping, 3, method):
        for name, message in said.items():
            expected = (
                f"{name}: rank 1 is behind: clock 2, expected 3: it skipped optimizer.step(), for example by torch"
            )
            assert message.startswith(expected)
            assert "common.parallel.GradScaler" in message


def apart(rank: int, n: int) -> list[str]:
    said = []
    training = real(rank, BASE)
    if rank == 0:
        training.backward(0)  # a summary, before a checkpoint is loaded
    said.append(error_of(lambda: training.model.load_state_dict(training.model.state_dict())))
    training = real(rank, BASE).run(range(2))
    said.append(error_of(training.model.drain if rank == 0 else training.model.consensus_distance))
    training = real(rank, BASE).run(range(2))
    training.backward(2)
    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step(interrupted)
    said.append(error_of(training.model.drain))
    return said


def interrupted() -> None:
    raise KeyboardInterrupt


def test_another_forward_call_or_end_of_a_step_is_named() -> None:
    expected = [
        r"load_state_dict\(\): ranks \[0\] alone ran a training forward after 0 updates.*on model.module",
        r"expected the same call on every rank, got drain\(\) by ranks \[0\], consensus_distance\(\) by ranks \[1, 2\]",
        r"drain\(\): an exception ended optimizer.step\(\) on ranks \[1\] alone, update 2: call close\(\)",
    ]
    for said in run_processes(apart, 3):
        for message, pattern in zip(said, expected, strict=True):
            assert re.search(pattern, message)


def alone(rank: int, n: int, whose: str) -> tuple[float, str]:
    """Rank 0 drains alone, or its engine does; return the seconds until the error, and the error."""
    training = real(rank, SHORT).run(range(2))
    begin = time.monotonic()
    if rank == 0 and whose == "the model":
        said = error_of(training.model.drain)
    else:
        if rank == 0:
            training.model.mixer.drain()
        said = error_of(lambda: training.run(range(2, 20)))
    return time.monotonic() - begin, said


@pytest.mark.parametrize("whose", ["the model", "the engine"])
def test_a_drain_of_one_rank_ends_in_time_and_mixes_nothing_stale(whose: str) -> None:
    for rank, (seconds, said) in enumerate(run_processes(alone, 2, whose)):
        assert seconds < 8
        if rank == 0 and whose == "the model":
            assert said.startswith("rank 0: drain() failed: all 2 ranks must take part")
        else:
            assert re.search(r"gossip step [23] failed.*called alone what all ranks must call, such as drain\(\)", said)


def going_on(rank: int, n: int) -> None:
    for optimizer in ("momentum", "momentum+sgd", "fused_accumadamw"):
        scenario = replace(BASE, optimizer=optimizer, topology="one_peer_exponential")
        expected = snapshot(real(rank, scenario).run(range(4)).model)
        training = real(rank, scenario).run(range(2))
        optimizers = training.optimizers[0]
        saved = training.model.state_dict(), [o.state_dict() for o in optimizers]
        saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved)
        interrupt(training, 2)
        with pytest.raises(
            RuntimeError, match=r"a training forward inside an update, number 2, .*load_clock.*drain\(\)"
        ):
            training.backward(2)
        with pytest.raises(RuntimeError, match="an optimizer's step inside an update, number 2"):
            training.optimizer.step()
        training.model.drain()
        training.run([2])
        assert training.model.clock == 3
        interrupt(training, 3)
        training.model.load_state_dict(saved[0])
        training.model.load_clock(2)
        for o, state in zip(optimizers, saved[1], strict=True):
            o.load_state_dict(state)
        training.run([2, 3])
        for name, array in snapshot(training.model).items():
            assert (array == expected[name]).all(), (optimizer, name)
        training.model.close()


def interrupt(training: Training, step: int) -> None:
    """Let an exception end the last optimizer's step, bucket by bucket after the first one; of one, the merge."""
    *others, optimizer = training.optimizers[0]
    training.backward(step)
    for other in others:
        other.step()
    if hasattr(optimizer, "arriving"):
        update, calls = FlatState.update, []

        def failing(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
            update(*arguments)

        with patch.object(FlatState, "update", failing), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert len(calls) == 2
    elif others:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(interrupted)
    else:
        with patch.object(training.model.mixer, "merge", interrupted), pytest.raises(KeyboardInterrupt):
            optimizer.step()
    training.model.zero_grad()


def test_after_an_interrupted_update_training_goes_on() -> None:
    run_processes(going_on, 2)


def nested(rank: int, n: int) -> None:
    training = real(rank, BASE).run(range(3))
    model, before = training.model, snapshot(training.model)
    with model.averaged() as outer:
        mean = snapshot(outer)
        with model.averaged() as inner:
            assert all((snapshot(inner)[name] == mean[name]).all() for name in mean)
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) inside `with model.averaged\(\)`"):
            training.optimizer.step()
        for name in ("average_()", "consensus_distance()", "load_state_dict()", "drain()"):
            with pytest.raises(
                RuntimeError, match=re.escape(name) + r" inside `with model.averaged\(\)`: leave the block"
            ):
                OPERATIONS[name](model)
    assert all((snapshot(model)[name] == before[name]).all() for name in before)
    training.run([3])
    model.close()
    with pytest.raises(RuntimeError, match=r"consensus_distance\(\) after close\(\): wrap model.module anew"):
        model.consensus_distance()
    model.load_state_dict(model.state_dict())  # nothing is in flight
    model.close()


def test_averaged_nests_and_refuses_what_would_be_undone() -> None:
    run_processes(nested, 2)
