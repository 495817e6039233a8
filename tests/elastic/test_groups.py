"""Groups of members that change, in real processes."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from common.parallel import making_groups
from common.parallel.making_groups import NewGroups, ReconfiguredGroups, abort_groups, groups_of_members
from tests.distributed.processes import run_processes
from tests.ports import free_port
from tests.waiting import Resources, held

MEMBERSHIPS, SETTLED, N = 240, 40, 3
TIMEOUT = timedelta(seconds=60)


def changing(process: int, n: int, how: str, port: int) -> list[Resources]:
    """Go through memberships of all, and of all but one, some of which break; return what is held after each."""
    dist.barrier()  # nobody closes connections that a slower rank still makes
    dist.destroy_process_group()
    served = dist.TCPStore("127.0.0.1", port, is_master=process == 0, wait_for_workers=False, timeout=TIMEOUT)
    groups = making_groups.current = groups_of_members(how, process, torch.device("cpu"))
    gc.freeze()
    resources = []
    for number in range(MEMBERSHIPS + 1):
        away = number // 2 % n if number % 2 else None
        members = [member for member in range(n) if member != away]
        if process in members:
            connect(served, groups, number, members.index(process), len(members))
            if number % 3 == 0:
                abort_groups()
                with pytest.raises(RuntimeError):
                    dist.all_reduce(torch.ones(1))
        if number < MEMBERSHIPS:
            groups.end()
            gc.collect()
        resources.append(held())
        served.set(f"over/{number}/{process}", "")
        served.wait([f"over/{number}/{other}" for other in range(n)])
    return resources[:MEMBERSHIPS]


def connect(served: dist.Store, groups: making_groups.NewGroups, number: int, rank: int, size: int) -> None:
    """Connect, sum and send a message, in the order of the members."""
    groups.open(dist.PrefixStore(str(number), served), number, rank, size, TIMEOUT)
    pairs = [(first, (first + 1) % size) for first in range(size if size > 2 else 1)]
    made = [groups.new(None, TIMEOUT), *(groups.new(sorted(pair), TIMEOUT) for pair in pairs)]
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for group, ranks in zip(made, [range(size), *pairs], strict=True):
        if rank in ranks:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            assert total == sum(ranks)
    for first, second in pairs:
        group, received = made[1 + pairs.index((first, second))], torch.empty(1)
        if rank == first:
            dist.isend(torch.tensor([number + 0.5]), second, group=group).wait(TIMEOUT)
        if rank == second:
            dist.irecv(received, first, group=group).wait(TIMEOUT)
            assert received == number + 0.5


@pytest.mark.slow
def test_nothing_is_left_of_former_memberships(groups: str) -> None:
    """Threads, descriptors and memory stay as they are, in every process."""
    for resources in run_processes(changing, N, groups, free_port()):
        early, late = resources[SETTLED : 2 * SETTLED], resources[-SETTLED:]
        assert max(r.threads for r in late) <= max(r.threads for r in early)
        assert max(r.files for r in late) <= max(r.files for r in early)
        assert max(r.megabytes for r in late) < max(r.megabytes for r in early) + 8


@pytest.mark.parametrize(
    ("version", "how", "device", "expected"),
    [
        ("2.13.0+cpu", "reconfigured", "cpu", "reconfigured on CPUs with torch 2.13.0.cpu: expected new"),
        ("2.14.1", "auto", "cuda", "auto on GPUs with torch 2.14.1: expected auto, with torch 2.15 or later"),
        ("2.15.0", "new", "cuda", "new on GPUs with torch 2.15.0: expected auto, with torch 2.15 or later"),
    ],
)
def test_what_this_torch_cannot_is_refused(
    version: str, how: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ValueError, match=rf"elastic\.groups={expected}"):
        groups_of_members(how, 0, torch.device(device))


@pytest.mark.parametrize(("version", "makes"), [("2.13.0+cpu", NewGroups), ("2.14.0a0", ReconfiguredGroups)])
def test_groups_are_reconfigured_where_torch_can(version: str, makes: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert type(groups_of_members("auto", 0, torch.device("cpu"))) is makes
    assert type(groups_of_members("new", 0, torch.device("cpu"))) is NewGroups
