"""The all-reduce baseline: PyTorch's DistributedDataParallel behind the contract of the gossip wrapper.

Gradients can be compressed by PyTorch's own communication hooks, which a user of DDP would try before gossip:

fp16:     gradients are averaged in 16 bits
powersgd: matrices are averaged as products of two thin matrices, with error feedback (arXiv 1905.13727)
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.arguments import BUCKET_MB, TIMEOUT_S, Bounds, check_arguments
from common.flat import refuse_dtensors
from common.parallel.averaging import average_buffers_, averageable_buffers, consensus_distance
from common.parallel.checks import check_equal_on_all_ranks, check_unwrapped, refuse_complex
from common.parallel.collectives import broadcast_from_first
from common.parallel.data_parallel import OPEN, DataParallel
from common.parallel.process_groups import ProcessGroups, group_timeout
from common.parallel.streams import is_queued

Hook = Literal["fp16", "powersgd"]
COLUMNS = Bounds(1, 1e13, "columns")
PASSES = Bounds(2, 1e13, "backward passes; DDP lays its buckets out anew after the first one")


class AllReduceDataParallel(DataParallel):
    """DDP averages gradients over all workers; the optimizer is the same as for gossip.

    bucket_mb:              DDP's bucket size (its default: 25)
    find_unused_parameters: as in DDP, needed when some parameters get no gradient in some steps
    timeout_s:              seconds to wait for a peer
    hook:                   how gradients are compressed, "fp16" or "powersgd", see above
    powersgd_rank:          rank of PowerSGD's approximation
    powersgd_from:          backward passes before PowerSGD begins

    Buffers stay local during training, as under gossip, so that the methods differ in nothing else; `averaged()`
    averages them. Gradients are views of DDP's buckets: clone one to keep it beyond `zero_grad()`.
    `counters.bytes_sent` assumes a ring: 2 (n-1)/n times the bytes that are averaged in each synchronisation; DDP does
    not expose what its collectives really sent or how long it waited for them.

    Raises ValueError for an argument of another type or out of range, and for a parameter that another wrapper holds
    and has not released by close().
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: Annotated[float, BUCKET_MB] = 25.0,
        find_unused_parameters: bool = False,
        timeout_s: Annotated[float, TIMEOUT_S] = 600.0,
        hook: Hook | None = None,
        powersgd_rank: Annotated[int, COLUMNS] = 1,
        powersgd_from: Annotated[int, PASSES] = 1000,
    ) -> None:
        check_arguments(AllReduceDataParallel.__init__, locals())
        device = check_unwrapped(module)
        refuse_dtensors(module)
        if hook is not None:
            refuse_complex(f"hook={hook}", module.parameters())
        self._compression = Compression(hook, powersgd_rank, powersgd_from)
        self._queued = is_queued(device)
        groups = ProcessGroups(1, group_timeout(timedelta(seconds=float(timeout_s)), device))
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
                groups.between_workers, bucket_cap_mb=bucket_mb, find_unused_parameters=find_unused_parameters
            )
            self._compression.register(self._ddp, groups.between_workers)
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
        """Return PowerSGD's state; nothing with other hooks."""
        return self._compression.state()

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`; raise as `Compression.load` does.

        With hook="powersgd" run one forward, backward and zero_grad of the new wrapper before.
        """
        self._compression.load(state)
        self._synchronizing = False  # an earlier backward belongs to the state that was replaced

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


def _bucket_after_bucket(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Compress a bucket as PyTorch does, and wait: it starts collectives in callbacks, which gloo runs in any order."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


class Compression:
    """A communication hook of DDP, its state, and what it sends.

    hook:          None: gradients travel uncompressed
    powersgd_rank: columns of the thin matrices
    powersgd_from: backward passes that are averaged uncompressed before PowerSGD begins
    """

    def __init__(self, hook: Hook | None, powersgd_rank: int, powersgd_from: int) -> None:
        self._hook, self._rank, self._from = hook, powersgd_rank, powersgd_from
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._counted = 0  # elements that PowerSGD has sent
        self._device = torch.device("cpu")

    def register(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Make DDP average over `group` with the hook."""
        self._device = next(model.parameters()).device
        if self._hook == "powersgd":
            self._state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=self._rank, start_powerSGD_iter=self._from
            )
            queued = is_queued(self._device)
            model.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook if queued else _bucket_after_bucket)
        elif self._hook == "fp16":
            model.register_comm_hook(group, default_hooks.fp16_compress_hook)

    def bytes_averaged(self, parameters: Sequence[Tensor]) -> float:
        """Return the bytes that the last backward averaged; with PowerSGD, thin matrices and what it left whole."""
        if self._state is not None:
            before, self._counted = self._counted, self._state.total_numel_after_compression
            if self._counted > before:
                return (self._counted - before) * parameters[0].element_size()
        if self._hook == "fp16":
            return 2.0 * sum(parameter.numel() for parameter in parameters)
        return sum(parameter.nbytes for parameter in parameters)

    def state(self) -> dict[str, Tensor]:
        """Return what the next backward depends on: PowerSGD's count, and each bucket's error and two matrices."""
        if self._state is None:
            return {}
        kept = {
            f"{name}.{bucket}": tensor for name, memory in self._memories().items() for bucket, tensor in memory.items()
        }
        return {"powersgd_passes": torch.tensor(self._state.iter)} | kept

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from `state()`.

        Raises ValueError if the state is another hook's, and RuntimeError if PowerSGD has begun there, but no backward
        has run here.
        """
        if saved if self._state is None else "powersgd_passes" not in saved:
            raise ValueError(
                f"communication state: expected that of parallel.hook={self._hook}, got {', '.join(saved) or 'nothing'}"
            )
        if self._state is None:
            return
        tensors, memories = dict(saved), self._memories()
        passes = int(tensors.pop("powersgd_passes"))
        if self._state.iter == 0 and passes >= self._from:
            raise RuntimeError(
                f"load_communication_state of PowerSGD after {passes} backward passes: expected one forward, backward "
                "and zero_grad before it: DDP lays out anew, in its first backward, the buckets to which the state "
                "belongs"
            )
        self._state.iter = passes
        self._state.rng.seed(0)  # as in a new process
        for memory in memories.values():
            memory.clear()
        for name, tensor in tensors.items():
            memory, _, bucket = name.rpartition(".")
            memories[memory][int(bucket)] = tensor.to(self._device, copy=True)

    def _memories(self) -> dict[str, dict[int, Tensor]]:
        """Return PowerSGD's tensors for each bucket: the error and both thin matrices."""
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}
