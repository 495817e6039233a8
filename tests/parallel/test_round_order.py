"""Rounds take turns on the links between hosts."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from common.parallel.gossip.exchange import ReceiveBuffers
from common.parallel.gossip.network import SLACK, Network, RoundOrder
from common.parallel.gossip.point_to_point import SendRecv
from common.parallel.gossip.routes import Route
from common.topology import Transport, build
from tests.waiting import LIMIT_S


def blocked(turns: RoundOrder, turn: int, passed: threading.Event) -> bool:
    """Whether a message of round `turn` has to wait; sets `passed` once it may go."""

    def send() -> None:
        turns.wait(turn)
        passed.set()

    threading.Thread(target=send, daemon=True).start()
    return not passed.wait(0.2)


def test_a_round_waits_for_all_but_the_last_messages_of_earlier_ones() -> None:
    turns, third = RoundOrder(), threading.Event()
    for turn in (1, 1, 2, 3):
        turns.enter(turn)
    assert blocked(turns, 3, third)
    turns.leave(1)
    assert not third.wait(0.2)  # one each of rounds 1 and 2
    turns.leave(2)
    assert third.wait(LIMIT_S)
    assert SLACK == 1


def test_messages_of_one_round_and_of_later_ones_hold_nobody_up() -> None:
    turns = RoundOrder()
    for turn in (2, 2, 2, 3, 3):
        turns.enter(turn)
    assert not blocked(turns, 2, threading.Event())


def test_the_network_holds_the_next_round_back() -> None:
    order: list[str] = []
    arrived = threading.Event()

    def exchange(name: str, turn: int, wait: bool) -> SimpleNamespace:
        stages = {1: lambda: order.append(f"{name} sent"), 2: lambda: arrived.wait(LIMIT_S) if wait else None}
        return SimpleNamespace(
            chunk=torch.zeros(1),
            turn=turn,
            stages=3,
            between_hosts=range(1, 3),
            staged=threading.Event(),
            receives=list,
            start=list,
            run_stage=lambda index, timeout: stages.get(index, lambda: None)(),
        )

    network = Network(timedelta(seconds=10))
    last = exchange("next", 2, wait=False)
    network.post([exchange("first", 1, wait=True), exchange("second", 1, wait=True), last])
    assert not last.staged.wait(0.3)
    assert order == ["first sent", "second sent"]
    arrived.set()
    assert last.staged.wait(LIMIT_S)
    assert order[-1] == "next sent"
    network.close()


@pytest.mark.parametrize(
    ("clock", "workers_per_host", "takes_turns"),
    [(0, 2, False), (1, 2, True), (1, 1, False)],
    ids=["inside a host", "between hosts", "between hosts of one worker"],
)
def test_plain_messages_take_turns_where_workers_share_a_link(
    clock: int, workers_per_host: int, takes_turns: bool
) -> None:
    route = Route(Transport.SEND_RECV, build("hypercube", 4).round(clock), 0, workers_per_host)
    exchange = SendRecv(torch.zeros(1), route, ReceiveBuffers())
    assert bool(exchange.between_hosts) == takes_turns
    assert bool(exchange.stages) == takes_turns
