"""Memory for what arrives, kept from round to round."""

import torch
from torch import Tensor


class BufferPool:
    """Vectors that are taken and given back.

    On the CPU fresh memory costs a page fault for every 4 KB, in every step. On CUDA the allocator keeps memory by
    itself, and knows on which streams it is used.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A vector [numel] of any content."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, vector: Tensor) -> None:
        """Nobody reads or writes it any more."""
        if vector.device.type == "cpu":
            self._free.setdefault((vector.numel(), vector.dtype), []).append(vector)
