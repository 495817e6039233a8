"""Check 4 on the engine's path for GPUs, with streams that do nothing: messages come when somebody waits for them."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

from common.parallel.gossip.hierarchical import HierarchicalByCollectives
from common.parallel.gossip.mixer import Mixer
from scripts.gpu_check import races
from scripts.gpu_check.outcome import FailedError, Machine
from tests.cuda.device import queued_everywhere
from tests.naming import case

CPU = Machine("cpu")
pytestmark = pytest.mark.slow


class Idle:
    """A stream or an event without a device."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0


@pytest.fixture(autouse=True)
def queued() -> Iterator[None]:
    replaced = {"Stream": Idle, "Event": Idle, "current_stream": Idle, "stream": lambda _: nullcontext()}
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch(f"torch.cuda.{name}", value))
        stack.enter_context(queued_everywhere())
        yield


@pytest.mark.usefixtures("eager_kernel")
def test_late_messages_change_nothing() -> None:
    for fused in (False, True):
        for gossip in races.FLAT + races.BETWEEN_HOSTS:
            with case(gossip, fused):
                assert races.compare(CPU, gossip, fused) < 1e-5


@pytest.mark.usefixtures("eager_kernel")
def test_messages_nobody_waits_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Mixer, "_wait", lambda *_: None)
        for gossip in ({"topology": "ring"}, {"topology": "complete"}):
            with case(gossip), pytest.raises(FailedError, match="late messages change parameters"):
                races.compare(CPU, gossip, fused=True)
    waits = HierarchicalByCollectives._wait_for

    def skip_the_first(exchange: HierarchicalByCollectives, timeout: timedelta, *works: list) -> None:
        if not hasattr(exchange, "skipped"):
            exchange.skipped = works
            return
        waits(exchange, timeout, *works)

    monkeypatch.setattr(HierarchicalByCollectives, "_wait_for", skip_the_first)
    with pytest.raises(FailedError, match="late messages change parameters"):
        races.compare(CPU, {"topology": "aer", "workers_per_host": 2}, fused=True)
