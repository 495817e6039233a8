"""The all-reduce baseline: PyTorch's DistributedDataParallel behind the contract of the gossip wrapper."""

from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor, nn

from common.arguments import check_arguments
from common.flat import refuse_dtensors
from common.parallel.averaging import average_buffers_, consensus_distance
from common.parallel.checks import (
    check_device,
    check_equal_on_all_ranks,
    check_module,
    check_ownership,
    check_sizes,
    refuse_complex,
)
from common.parallel.collectives import broadcast_from_first
from common.parallel.data_parallel import OPEN, DataParallel, averageable_buffers
from common.parallel.hooks import Compression
from common.parallel.process_groups import ProcessGroups, patience
from common.parallel.streams import is_queued


class AllReduceDataParallel(DataParallel):
    """Gradients averaged over all workers by DDP, then the same optimizer as everywhere.

    bucket_mb:              DDP's bucket size (its default: 25)
    find_unused_parameters: as in DDP, needed when some parameters get no gradient in some steps
    timeout_s:              seconds to wait for a peer
    hook:                   how gradients are compressed, "fp16" or "powersgd" (`common.parallel.hooks`)
    powersgd_rank:          rank of PowerSGD's approximation
    powersgd_from:          backward passes before it begins

    Buffers stay local while training, as under gossip, so that the methods differ in nothing else; `averaged()`
    averages them. `counters.bytes_sent` assumes a ring: 2 (n-1)/n times the bytes that are averaged in each
    synchronisation; DDP does not expose what its collectives really sent or how long they were waited for.

    Raises ValueError for an argument of another type or out of range, and for a parameter that another wrapper holds,
    until that is closed.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        timeout_s: float = 600.0,
        hook: str | None = None,
        powersgd_rank: int = 1,
        powersgd_from: int = 1000,
    ) -> None:
        check_arguments(AllReduceDataParallel.__init__, locals())
        check_module(module)
        check_ownership(module)
        check_sizes(bucket_mb, timeout_s)
        refuse_dtensors(module)
        if hook is not None:
            refuse_complex(f"hook={hook}", module.parameters())
        self._compression = Compression(hook, powersgd_rank, powersgd_from)
        device = check_device(p for p in module.parameters() if p.requires_grad)
        self._queued = is_queued(device)
        groups = ProcessGroups(1, patience(timedelta(seconds=timeout_s), device))
        super().__init__(module, groups.rank, groups.world_size, groups.world)
        self._groups = groups
        facts = {
            "bucket_mb": bucket_mb,
            "find_unused_parameters": find_unused_parameters,
            "hook": (hook, powersgd_rank, powersgd_from),
        }
        check_equal_on_all_ranks(facts, groups.world, self.bare_module)
        broadcast_from_first([*module.parameters(), *module.buffers()], groups.world)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._synchronizing = False
        if self.world_size > 1 and self._trained:
            self._average_gradients(
                groups.world, bucket_cap_mb=bucket_mb, find_unused_parameters=find_unused_parameters
            )
            self._compression.register(self._ddp, groups.world)
        OPEN.add(self)

    def _before_forward(self) -> None:
        self._count()
        self._synchronizing = self._ddp is not None and self._ddp.require_backward_grad_sync

    def _before_update(self) -> None:
        self._count()

    def _after_update(self) -> None:
        self.counters.rounds += 1

    def _count(self) -> None:
        """Count what the last backward sent, if it averaged gradients."""
        if self._synchronizing:
            n = self.world_size
            self.counters.bytes_sent += 2 * (n - 1) / n * self._compression.bytes_averaged(self._trained)
            self.counters.messages += 2 * (n - 1)
            self._synchronizing = False

    def communication_state(self) -> dict[str, Tensor]:
        """Return what PowerSGD remembers; nothing otherwise."""
        return self._compression.state()

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`. Raises ValueError when it is that of another hook."""
        self._compression.load(state)
        self._synchronizing = False  # a backward before it belongs to what it replaces

    def _release(self, clean: bool, patient: bool) -> None:
        super()._release(clean, patient)
        if not self._queued:
            self._groups.abort()  # destroying them would wait for what an exception has left in flight
        if clean or not self._queued:
            self._groups.close()

    def average_(self) -> None:
        """Average the buffers for good. Collective."""
        self._begin("average_()")
        self._write_mean()

    def consensus_distance(self) -> float:
        """Return the measured distance: 0 unless something is wrong. Collective."""
        self._begin("consensus_distance()")
        vectors = [p.detach().reshape(-1) for p in self.parameters() if p.requires_grad]
        return consensus_distance(vectors, self.world_size, self._groups.world)

    def _mean_state(self) -> list[Tensor]:
        """Return only the buffers: parameters are equal already."""
        return averageable_buffers(self.bare_module)

    def _write_mean(self) -> None:
        average_buffers_(self._mean_state(), self.world_size, self._groups.world)
