"""Compressed all-reduce by PyTorch's own communication hooks: what a user of DDP would pick before gossip.

fp16:     gradients are averaged in 16 bits
powersgd: matrices are averaged as products of two thin ones, with error feedback (arXiv 1905.13727)
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("fp16", "powersgd")
FIRST_POWERSGD = 2  # DDP lays its buckets out anew after its first backward


class Compression:
    """A communication hook of DDP, its state, and what it sends.

    hook:          one of HOOKS; None: gradients travel as they are
    powersgd_rank: columns of the thin matrices
    powersgd_from: backward passes that are averaged as they are before PowerSGD begins

    Raises ValueError for an argument out of range.
    """

    def __init__(self, hook: str | None, powersgd_rank: int, powersgd_from: int) -> None:
        check_hook(hook, powersgd_rank, powersgd_from)
        self._hook, self._rank, self._from = hook, powersgd_rank, powersgd_from
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._counted = 0  # elements that PowerSGD has sent
        self._device = torch.device("cpu")

    def register(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Have DDP average by the hook over `group`."""
        self._device = next(model.parameters()).device
        if self._hook == "powersgd":
            self._state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=self._rank, start_powerSGD_iter=self._from
            )
            model.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)
        elif self._hook == "fp16":
            model.register_comm_hook(group, default_hooks.fp16_compress_hook)

    def bytes_averaged(self, parameters: Sequence[Tensor]) -> float:
        """Return the bytes that the last backward averaged; of PowerSGD both thin matrices and what stayed whole."""
        if self._state is not None:
            before, self._counted = self._counted, self._state.total_numel_after_compression
            if self._counted > before:
                return (self._counted - before) * parameters[0].element_size()
        if self._hook == "fp16":
            return 2.0 * sum(parameter.numel() for parameter in parameters)
        return sum(parameter.nbytes for parameter in parameters)

    def state(self) -> dict[str, Tensor]:
        """Return what the next backward depends on: PowerSGD's count; of each bucket the error and both matrices."""
        if self._state is None:
            return {}
        kept = {
            f"{name}.{bucket}": tensor for name, memory in self._memories().items() for bucket, tensor in memory.items()
        }
        return {"powersgd_passes": torch.tensor(self._state.iter)} | kept

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from `state()`.

        Raises ValueError when it is that of another hook.
        """
        if saved if self._state is None else "powersgd_passes" not in saved:
            raise ValueError(
                f"communication state: expected that of parallel.hook={self._hook}, got {', '.join(saved) or 'nothing'}"
            )
        if self._state is None:
            return
        tensors = dict(saved)
        self._state.iter = int(tensors.pop("powersgd_passes"))
        memories = self._memories()
        for name, tensor in tensors.items():
            memory, _, bucket = name.rpartition(".")
            memories[memory][int(bucket)] = tensor.to(self._device, copy=True)

    def _memories(self) -> dict[str, dict[int, Tensor]]:
        """Return PowerSGD's tensors of each bucket: the error, and both thin matrices."""
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}


def check_hook(hook: str | None, powersgd_rank: int, powersgd_from: int) -> None:
    """Raise ValueError for an unknown hook, or for a number that PowerSGD cannot take."""
    if hook is not None and hook not in HOOKS:
        raise ValueError(f"hook={hook!r}: expected one of {', '.join(HOOKS)}, or none")
    if powersgd_rank < 1:
        raise ValueError(f"powersgd_rank={powersgd_rank}: expected a number of columns >= 1")
    if powersgd_from < FIRST_POWERSGD:
        raise ValueError(
            f"powersgd_from={powersgd_from}: expected a number of backward passes >= {FIRST_POWERSGD}: DDP lays its "
            "buckets out anew after the first one"
        )
