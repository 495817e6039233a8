"""Statistics of the ranks that one simulated worker stands for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RankBuffers:
    """Each rank's own buffers of a shared module.

    Real ranks of one worker have equal parameters, but each collects the BatchNorm statistics of its own batches. A
    simulated worker runs them one after the other on one module: this swaps the buffers. Between uses the module holds
    the mean over the ranks, so that a mean over workers is a mean over all ranks.
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = list(module.buffers())
        self._ranks = [[buffer.clone() for buffer in self._module] for _ in range(ranks)]

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Give the module, inside the block, the buffers of local rank `rank` (0 is the worker's first rank)."""
        for buffer, own in zip(self._module, self._ranks[rank], strict=True):
            buffer.copy_(own)
        try:
            yield
        finally:
            for own, buffer in zip(self._ranks[rank], self._module, strict=True):
                own.copy_(buffer)
            for buffer, *owned in zip(self._module, *self._ranks, strict=True):
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack(owned).mean(0))

    def reset(self) -> None:
        """Give every rank the module's buffers."""
        for owned in self._ranks:
            for own, buffer in zip(owned, self._module, strict=True):
                own.copy_(buffer)

    def state_dict(self) -> list[list[Tensor]]:
        """Return a list of buffers for each rank."""
        return self._ranks

    def load_state_dict(self, state: list[list[Tensor]]) -> None:
        """Continue from `state_dict()`."""
        for owned, saved in zip(self._ranks, state, strict=True):
            for own, buffer in zip(owned, saved, strict=True):
                own.copy_(buffer)
