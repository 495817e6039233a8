"""The process groups that gossip needs: few, made once, in the same order on every rank."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from common.parallel.collectives import is_distributed
from common.parallel.consistency import check_equal_on_all_ranks


class Communicators:
    """Process groups and the map between workers and ranks.

    A worker is `ranks_per_worker` consecutive ranks that share one replica; rank l of a worker talks to rank l of
    other workers only (a "rail").

    world:  all ranks (control: evaluation average, checks)
    inner:  the ranks of this worker, None if it is one rank
    rail:   the ranks with this rank's place inside the worker; all point-to-point messages travel here
    """

    def __init__(self, ranks_per_worker: int, timeout: timedelta) -> None:
        self.distributed = is_distributed()
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.rank = dist.get_rank() if self.distributed else 0
        # A group of our own, as all others here, so that messages never queue with the user's collectives.
        self.world = dist.new_group(timeout=timeout) if self.distributed else None
        check_equal_on_all_ranks({"ranks_per_worker": ranks_per_worker}, self.world)  # the groups below depend on it
        if ranks_per_worker < 1 or self.world_size % ranks_per_worker:
            raise ValueError(
                f"ranks_per_worker={ranks_per_worker}: expected a positive divisor of the number of ranks, "
                f"{self.world_size}"
            )
        self.ranks_per_worker = ranks_per_worker
        self.workers = self.world_size // ranks_per_worker
        self.worker, self.place = divmod(self.rank, ranks_per_worker)
        self._timeout = timeout
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self.inner = self.rail = None
        if self.distributed:
            workers, places = range(self.workers), range(ranks_per_worker)
            rails = [dist.new_group(self._ranks(workers, place), timeout=timeout) for place in places]
            self.rail = rails[self.place]
            if ranks_per_worker > 1:
                inner = [
                    dist.new_group([w * ranks_per_worker + place for place in places], timeout=timeout) for w in workers
                ]
                self.inner = inner[self.worker]

    def to_rank(self, worker: int) -> int:
        """The rank of that worker which has this rank's place."""
        return worker * self.ranks_per_worker + self.place

    def open_groups(self, purpose: str, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make a process group for each of these groups of workers, unless it is there. Collective.

        Groups of different purposes never share one: their collectives come in different orders.
        """
        if not self.distributed:
            return
        for members in sorted(wanted):
            for place in range(self.ranks_per_worker):
                key = (purpose, self._ranks(members, place))
                if key not in self._groups:
                    self._groups[key] = dist.new_group(key[1], timeout=self._timeout)

    def group(self, purpose: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of these workers at this rank's place; None if it was not opened."""
        return self._groups.get((purpose, self._ranks(members, self.place)))

    def _ranks(self, workers: range | tuple[int, ...], place: int) -> tuple[int, ...]:
        return tuple(worker * self.ranks_per_worker + place for worker in workers)
