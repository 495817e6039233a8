"""No training waits in a circle by NCCL's rules, whatever the topology, transport, phases and clock it starts at."""

import itertools
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.parallel import GradScaler
from common.parallel.gossip.routes import Routes
from common.parallel.process_groups import ProcessGroups
from common.topology import NAMES, Topology, Transport, build, in_phases, transport_of
from tests.cuda.device import Trace, emulated
from tests.cuda.matcher import DeadlockError, MismatchError, replay
from tests.cuda.programs import Program, topologies, traces_of

RANDOM_CLOCKS = 3  # of schedules without a period
SIZES = (2, 4, 5, 8)
OTHER_SIZES = (3, 6, 7)


def programs(name: str, sizes: Sequence[int], transports: tuple[str, ...]) -> list[Program]:
    """Return all trainings of a topology over these numbers of workers."""
    return [
        Program(topology, transport, phases, start=start, by_bucket=by_bucket)
        for topology in topologies(sizes, [name])
        for phases in ("aligned", "staggered")
        if can_be(topology, phases)
        for transport in transports
        if transport == "auto" or is_other_than_auto(topology, transport)
        for start in range(topology.period or RANDOM_CLOCKS)
        for by_bucket in (True, False)
    ]


def can_be(topology: Topology, phases: str) -> bool:
    try:
        in_phases(topology, phases)
    except ValueError:
        return False
    return True


def is_other_than_auto(topology: Topology, transport: str) -> bool:
    rounds = [topology.round(t) for t in range(topology.period or RANDOM_CLOCKS)]
    auto = {(round_.groups is not None, transport_of(round_, topology.workers_per_host)) for round_ in rounds}
    wanted = Transport.SEND_RECV if transport == "send_recv" else Transport.SUBGROUP
    return any(kind not in (wanted, Transport.IDLE) and (uniform or transport == "send_recv") for uniform, kind in auto)


def check(cases: list[Program]) -> None:
    with emulated() as here:
        for case in cases:
            traces = traces_of(case, here)
            try:
                replay(traces)
                replay(traces, one_at_a_time=True)
            except AssertionError as error:
                error.add_note(str(case))
                raise


@pytest.mark.parametrize("name", NAMES)
def test_no_training_deadlocks(name: str) -> None:
    check(programs(name, SIZES, ("auto",)))


@pytest.mark.parametrize("name", NAMES)
def test_no_training_with_a_forced_transport_deadlocks(name: str) -> None:
    check(programs(name, range(1, 7), ("send_recv", "subgroup")))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_training_of_another_size_deadlocks(name: str) -> None:
    check(programs(name, OTHER_SIZES, ("auto",)))
    check(programs(name, (7, 8, 9), ("send_recv", "subgroup")))


@pytest.mark.parametrize("message_dtype", [torch.bfloat16, torch.int8])
def test_no_training_with_narrow_messages_deadlocks(message_dtype: torch.dtype) -> None:
    cases = [("aer", 8, 2), ("aer", 4, 1), ("one_peer_ring", 7, 1), ("base_k", 6, 2), ("star", 5, 1)]
    check([Program(build(*case), message_dtype=message_dtype) for case in cases])


@pytest.mark.parametrize("workers", [range(3, 4), pytest.param(range(4, 6), marks=pytest.mark.slow)], ids=str)
def test_no_training_with_several_ranks_for_each_worker_deadlocks(workers: range) -> None:
    """Gossip and DDP have a communicator each, whose kernels may not fit on a device side by side."""
    cases = [
        Program(topology, phases=phases, ranks_per_worker=2, start=start, by_bucket=by_bucket)
        for topology in topologies(workers, NAMES)
        for phases in ("aligned", "staggered")
        if can_be(topology, phases)
        for start in range(min(2, topology.period or 2))
        for by_bucket in (True, False)
    ]
    check(cases)


@pytest.fixture
def in_fp16() -> Callable[[], object]:
    """What the loss scaler does in every step."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu")

    def step() -> None:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def test_no_training_in_fp16_deadlocks(in_fp16: Callable[[], object]) -> None:
    check([Program(topology, after_backward=in_fp16) for topology in topologies(range(1, 8), NAMES)])


IDLING = [("one_peer_ring", 5, 1), ("random_matching", 7, 1), ("aer", 8, 1), ("base_k", 5, 1)]


@pytest.mark.parametrize("case", IDLING)
def test_a_worker_that_idles_holds_nobody_up(case: tuple[str, int, int]) -> None:
    """Where all must wait for all in each step, groups that are not connected at the start end in a deadlock."""
    topology = build(*case)

    def wait_for_all() -> None:
        found = torch.zeros(1)
        dist.all_reduce(found)
        here.trace.host_sync("item")

    with emulated() as here:
        cases = [Program(topology, start=start, after_backward=wait_for_all) for start in range(topology.period or 3)]
        for case in cases:
            replay(traces_of(case, here))
        with patch.object(ProcessGroups, "warm_up", lambda *_: None):
            unconnected = [traces_of(case, here) for case in cases]
    with pytest.raises(DeadlockError, match="rank"):
        _ = [replay(traces) for traces in unconnected]


def test_a_rank_that_posts_in_another_order_is_found() -> None:
    topology = build("static_exponential", 4, 1)
    with emulated() as here:
        one, *others = traces_of(Program(topology), here)
        backward = [index for index, entry in enumerate(one.entries) if entry.what == "batch"][1:3]
        first, second = backward
        one.entries[first].transfers, one.entries[second].transfers = one.entries[second].transfers[::-1], ()
        with pytest.raises(MismatchError, match="rank 0"):
            replay([one, *others])


def test_a_route_that_peers_do_not_share_is_found() -> None:
    original = Routes._resolve

    def forgets(self, round_):
        route = original(self, round_)
        return None if self._groups.rank == 2 and route.sends else route

    with emulated() as here, patch.object(Routes, "_resolve", forgets), pytest.raises(MismatchError, match="rank 2"):
        replay(traces_of(Program(build("ring", 4, 1)), here))


class Ranks:
    """Traces made by hand: `at(rank)` is one of them."""

    def __init__(self, count: int) -> None:
        self.traces = [Trace(rank, count) for rank in range(count)]
        self.groups = [[trace.new_group(range(count)) for _ in range(2)] for trace in self.traces]

    def post(self, rank: int, group: int, what: str = "all_reduce") -> None:
        self.traces[rank].post(what, self.groups[rank][group], bytes=4).wait()


def test_the_first_operation_of_a_communicator_waits_for_all_its_ranks() -> None:
    ranks = Ranks(2)
    for rank, group in itertools.product(range(2), range(2)):
        ranks.post(rank, group if rank == 0 else 1 - group)
    with pytest.raises(DeadlockError, match=r"rank 0 waits in all_reduce \(\) of \(0, 1\); rank 1 waits"):
        replay(ranks.traces)


def test_two_communicators_run_side_by_side_but_not_where_kernels_take_all_room() -> None:
    ranks = Ranks(2)
    for rank, trace in enumerate(ranks.traces):
        for group in range(2):
            ranks.post(rank, group)
        side = trace.stream()
        ranks.post(rank, rank)
        with trace.on(side):
            ranks.post(rank, 1 - rank)
    assert replay(ranks.traces) == 8
    with pytest.raises(DeadlockError):
        replay(ranks.traces, one_at_a_time=True)


def test_a_host_that_waits_for_what_it_has_not_let_others_send_is_found() -> None:
    ranks = Ranks(2)
    for rank, trace in enumerate(ranks.traces):
        ranks.post(rank, 0)
        ranks.post(rank, 1)
        if rank == 0:
            ranks.post(rank, 0)
            trace.host_sync("item")
            ranks.post(rank, 1)
        else:
            ranks.post(rank, 1)
            trace.host_sync("item")
            ranks.post(rank, 0)
    with pytest.raises(DeadlockError, match=r"rank 0 waits in all_reduce"):
        replay(ranks.traces)


def test_communicators_of_other_sizes_do_not_fit() -> None:
    ranks = Ranks(2)
    ranks.post(0, 0)
    ranks.post(1, 0, "broadcast")
    with pytest.raises(MismatchError, match="collective 0"):
        replay(ranks.traces)
    ranks.traces[1].new_group([1])
    with pytest.raises(MismatchError, match="different communicators"):
        replay(ranks.traces)
