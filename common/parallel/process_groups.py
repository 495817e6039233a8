"""The device of a local process, and process groups.

The default group of a program, and the groups that gossip needs, made once, in the same order on every rank.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from common.parallel import making_groups
from common.parallel.checks import check_equal_on_all_ranks
from common.parallel.collectives import explained, is_distributed
from common.parallel.making_groups import abort_groups
from common.parallel.streams import is_queued
from common.rank_environment import check_launcher, find_master, from_launcher

WATCH_FIRST = timedelta(seconds=10)


def local_device() -> torch.device:
    """Return the GPU of this local rank, after making it current, or the CPU if GPUs are missing.

    If there are GPUs, but fewer than local processes, rank 0 says so.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    shortage = gpu_shortage()
    if shortage is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"notice: {shortage}; all of them compute on the CPU", file=sys.stderr, flush=True)
        return torch.device("cpu")
    device = torch.device("cuda", from_launcher("LOCAL_RANK") or 0)
    torch.cuda.set_device(device)
    return device


def gpu_shortage() -> str | None:
    """Return a phrase that counts local processes and visible GPUs; None if each process can have its own GPU.

    The launcher announces the processes of this host as LOCAL_WORLD_SIZE.
    """
    processes = from_launcher("LOCAL_WORLD_SIZE") or (from_launcher("LOCAL_RANK") or 0) + 1
    gpus = torch.cuda.device_count()
    return f"{processes} local processes for {gpus} visible GPU{'s' * (gpus != 1)}" if processes > gpus else None


def open_process_group(device: torch.device, timeout_s: float) -> None:
    """Open the default group: NCCL among GPUs, gloo among CPUs; collectives fail after `timeout_s` seconds.

    Raises ValueError naming a variable that a launcher should have set, or the address if no process listens there.
    """
    check_launcher()
    find_master()
    timeout = group_timeout(timedelta(seconds=timeout_s), device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except dist.DistNetworkError as error:
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']} in the environment"
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """Hold the default group open; yields this rank's device."""
    check_launcher()
    device = local_device()
    open_process_group(device, timeout_s)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def group_timeout(timeout: timedelta, device: torch.device) -> timedelta:
    """Return the timeout of process groups on a device; 10 s longer on CUDA.

    On CUDA, NCCL ends the run without naming the messages, so `common.parallel.streams.Watch` has to report first
    which of them have not arrived after `timeout`.
    """
    return timeout + WATCH_FIRST if is_queued(device) else timeout


class ProcessGroups:
    """The process groups of workers, and the map between workers and ranks.

    A worker is `ranks_per_worker` consecutive ranks that share one replica; a rank talks only to the ranks with
    the same index in other workers.

    world:           all ranks (evaluation average, checks)
    within_worker:   the ranks of this worker; None if it is one rank
    between_workers: the ranks with this rank's index in their workers; all point-to-point messages travel here
    """

    def __init__(self, ranks_per_worker: int, timeout: timedelta) -> None:
        self._made: list[dist.ProcessGroup] = []  # groups that this rank is in, in the order of creation
        self._timeout = timeout
        self.distributed = is_distributed()
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.rank = dist.get_rank() if self.distributed else 0
        # A separate group, like all others here, so that messages never queue with the user's collectives.
        self.world = self._new_group(None) if self.distributed else None
        check_equal_on_all_ranks({"ranks_per_worker": ranks_per_worker}, self.world)  # the groups below depend on it
        if ranks_per_worker < 1 or self.world_size % ranks_per_worker:
            raise ValueError(
                f"ranks_per_worker={ranks_per_worker}: expected a positive divisor of the number of ranks, "
                f"{self.world_size}"
            )
        self.ranks_per_worker = ranks_per_worker
        self.workers = self.world_size // ranks_per_worker
        self.worker, self._index = divmod(self.rank, ranks_per_worker)  # this rank's worker, and its index there
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self.within_worker = self.between_workers = None
        if self.distributed:
            workers, indices = range(self.workers), range(ranks_per_worker)
            between = [self._new_group(self._ranks(workers, index)) for index in indices]
            self.between_workers = between[self._index]
            if ranks_per_worker > 1:
                within = [self._new_group(tuple(w * ranks_per_worker + index for index in indices)) for w in workers]
                self.within_worker = within[self.worker]

    @property
    def ranks_of_worker(self) -> range:
        """The ranks of this worker."""
        return range(self.worker * self.ranks_per_worker, (self.worker + 1) * self.ranks_per_worker)

    def to_rank(self, worker: int) -> int:
        """Return that worker's rank with the same index as this rank."""
        return worker * self.ranks_per_worker + self._index

    def open_groups(self, purpose: str, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make a process group for each of these groups of workers, unless there is one already. Collective.

        Groups of different purposes are never shared: their collectives come in different orders.
        """
        if not self.distributed:
            return
        for members in sorted(wanted):
            for index in range(self.ranks_per_worker):
                key = (purpose, self._ranks(members, index))
                if key not in self._groups:
                    self._groups[key] = self._new_group(key[1])

    def group(self, purpose: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of these workers at this rank's index; None if it was not opened."""
        return self._groups.get((purpose, self._ranks(members, self._index)))

    def warm_up(self, device: torch.device) -> None:
        """Connect every group of this rank now, in the order in which groups were made. Collective.

        NCCL connects a group in its first operation, and waits for all members: in a round in which one of them has no
        peer, the others would wait for that member's next round.
        """
        if not self.distributed:
            return
        opened = [self.world, self.between_workers, self.within_worker, *self._groups.values()]
        for group in opened:
            if group is not None and dist.get_rank(group) >= 0:
                with explained("connecting the ranks of a process group"):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def abort(self) -> None:
        """Close the connections of all groups, see `abort_groups`; NCCL's end with the process."""
        abort_groups(self._made)

    def close(self) -> None:
        """Destroy all groups; ranks need not call it together, but each only after its last message has arrived."""
        for group in self._made:
            making_groups.current.close(group)
        self._made.clear()
        self._groups.clear()
        self.within_worker = self.between_workers = None

    def _new_group(self, ranks: tuple[int, ...] | None) -> dist.ProcessGroup:
        group = making_groups.current.new(ranks, self._timeout)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append(group)
        return group

    def _ranks(self, workers: range | tuple[int, ...], index: int) -> tuple[int, ...]:
        return tuple(worker * self.ranks_per_worker + index for worker in workers)
