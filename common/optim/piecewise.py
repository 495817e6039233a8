"""An update of accumulated Adam in pieces, by whoever knows in which order memory should be visited.

Gossip sets ``optimizer.carrier``: bucket by bucket it merges what arrived, updates, and sends the next message.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from common.optim.accum_adam import AccumAdam
from common.optim.compiled import FusedUpdate, as_vectors, merge_, span
from common.optim.functional import recurrence_arguments


class PiecewiseUpdate:
    """One update of all parameters of ``optimizer`` that have a gradient; every element in exactly one piece.

    optimizer: with ``fused=True``; making this object counts the update
    """

    def __init__(self, optimizer: AccumAdam) -> None:
        self._updates: dict[Tensor, tuple[FusedUpdate, int, list[Tensor]]] = {}
        for group in optimizer.param_groups:
            lists, steps = optimizer.begin_update(group)
            update = FusedUpdate(**recurrence_arguments(**optimizer.hyperparameters(group)))
            for *tensors, k in zip(*lists, steps, strict=True):
                self._updates[tensors[0]] = update, k, as_vectors(tensors)

    @torch.no_grad()
    def piece(
        self, parameter: Tensor, start: int, stop: int, merged: tuple[Tensor, float, float] | None = None
    ) -> None:
        """Update elements start..stop of the parameter's memory.

        merged: (r [stop - start], own, weight): first x <- own x + weight r, whether there is a gradient or not.
        """
        if parameter in self._updates:
            update, k, vectors = self._updates[parameter]
            update([span(vector, start, stop) for vector in vectors], k, merged)
        elif merged is not None:
            merge_(span(parameter, start, stop), *merged)
        increment_version(parameter)  # as any write in place does: autograd and the engine look at it
