"""An update of accumulated Adam in pieces, by whoever knows in which order memory should be visited.

Gossip sets ``optimizer.carrier``: bucket by bucket it merges what arrived, updates, and sends the next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from common.optim.accum_adam import AccumAdam
from common.optim.compiled import FusedUpdate, as_laid_out, merge_, span
from common.optim.functional import recurrence_arguments

Spans = dict[tuple[Tensor, int, int], list[Tensor]]


class PiecewiseUpdate:
    """One update of all parameters of ``optimizer`` that have a gradient; every element in exactly one piece.

    optimizer: with ``fused=True``; making this object counts the update
    spans:     of parameters and their state, as earlier updates have left them here; making them takes time
    """

    def __init__(self, optimizer: AccumAdam, spans: Spans | None = None) -> None:
        self._spans: Spans = {} if spans is None else spans
        self._updates: dict[Tensor, tuple[FusedUpdate, int, Tensor, list[Tensor]]] = {}
        for group in optimizer.param_groups:
            lists, steps = optimizer.begin_update(group)
            update = FusedUpdate(**recurrence_arguments(**optimizer.hyperparameters(group)))
            for parameter, gradient, *state, k in zip(*lists, steps, strict=True):
                self._updates[parameter] = update, k, as_laid_out(gradient, parameter), [parameter, *state]

    @torch.no_grad()
    def update(
        self,
        pieces: Iterable[tuple[Tensor, int, int, int]],
        incoming: tuple[Tensor, float, float] | None = None,
    ) -> None:
        """Update pieces of parameters of one dtype and device.

        pieces:   (parameter, start, stop, offset): elements start..stop of its memory
        incoming: (r, own, weight): first x <- own x + weight r[offset : offset + stop - start], whether there is a
                  gradient or not
        """
        received, *weights = incoming or (None,)
        alike: dict[tuple[FusedUpdate, int], list[list[Tensor]]] = {}
        for parameter, start, stop, offset in pieces:
            arrived = [] if received is None else [span(received, offset, offset + stop - start)]
            if parameter in self._updates:
                update, k, gradient, lasting = self._updates[parameter]
                x, *state = self._spans_of(lasting, start, stop)
                alike.setdefault((update, k), []).append([x, span(gradient, start, stop), *state, *arrived])
            elif arrived:
                merge_(span(parameter, start, stop), *arrived, *weights)
            increment_version(parameter)  # as any write in place does: autograd and the engine look at it
        for (update, k), rows in alike.items():
            update(rows, k, tuple(weights) or None)

    def _spans_of(self, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        key = tensors[0], start, stop
        spans = self._spans.get(key, [])
        addresses = [tensor.data_ptr() + start * tensor.element_size() for tensor in tensors]
        if [made.data_ptr() for made in spans] != addresses:  # the first time, and where a state was loaded
            spans = self._spans[key] = [span(tensor, start, stop) for tensor in tensors]
        return spans
