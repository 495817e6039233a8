"""Merge, update and launch bucket by bucket, with an optimizer that can update in pieces."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from common.optim import AccumAdam
from common.parallel.buckets import Bucket
from common.parallel.flat import FlatVector
from common.parallel.mixer import Mixer
from common.parallel.transport import Incoming


class Piece(NamedTuple):
    """Elements start..stop of a parameter's memory, which lie from `offset` on in their bucket."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


def updates_in_pieces(optimizer: Optimizer) -> bool:
    """Whether BucketwiseStep can carry out its steps: a fused AccumAdam(W)."""
    return isinstance(optimizer, AccumAdam) and all(group["fused"] for group in optimizer.param_groups)


class BucketwiseStep:
    """From now on `optimizer.step()` merges, updates and launches one bucket after another.

    Each element is read and written once, and the first bucket travels while the last is updated.
    """

    def __init__(self, optimizer: AccumAdam, mixer: Mixer) -> None:
        self.optimizer = optimizer
        self._mixer = mixer
        self._pieces = {id(bucket): pieces_of(bucket, mixer.vectors) for bucket in mixer.buckets}
        self._spans: dict = {}  # of PiecewiseUpdate
        optimizer.carrier = self._step

    def close(self) -> None:
        """Give the step back to the optimizer."""
        self.optimizer.carrier = None

    def _step(self) -> None:
        from common.optim.piecewise import PiecewiseUpdate  # brings the compiler, which takes seconds to import

        update = PiecewiseUpdate(self.optimizer, self._spans)

        def merge_and_update(bucket: Bucket, incoming: Incoming | None) -> None:
            update.update(self._pieces[id(bucket)], incoming)

        self._mixer.advance(merge_and_update)


def pieces_of(bucket: Bucket, vectors: Sequence[FlatVector]) -> list[Piece]:
    """The parts of parameters that lie in the bucket."""
    vector, first, last = vectors[bucket.vector], bucket.span.start, bucket.span.stop
    pieces = []
    for slot, parameter in zip(vector.slots, vector.parameters, strict=True):
        begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
        if begin < end:
            pieces.append(Piece(parameter, begin - slot.offset, end - slot.offset, begin - first))
    return pieces
