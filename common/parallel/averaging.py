"""Means over all workers of parameters and buffers, and how far the workers are from them."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.collectives import mean_over_ranks_, sendable, sum_over_ranks

CHUNK = 1 << 22  # elements handled at once, so that extra memory stays small


@contextlib.contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put the tensors back as they were, bit for bit, at the end of the block, also after an exception."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, saved, strict=True):
            tensor.copy_(copy)


def average_buffers_(buffers: Sequence[Tensor], n: int, group: dist.ProcessGroup | None) -> None:
    """Replace buffers by their means over the ranks, in one message for each dtype and device. Collective."""
    sent = [sendable(buffer.reshape(-1), group) for buffer in buffers]
    kinds = [(values.dtype, values.device) for values in sent]
    for kind in dict.fromkeys(kinds):
        same = [buffer for buffer, own in zip(buffers, kinds, strict=True) if own == kind]
        flat = torch.cat([values for values, own in zip(sent, kinds, strict=True) if own == kind])
        mean_over_ranks_([flat], n, group)
        for buffer, mean in zip(same, flat.split([b.numel() for b in same]), strict=True):
            buffer.copy_(mean.view(buffer.shape))


def consensus_distance(
    vectors: Sequence[Tensor],
    n: int,
    group: dist.ProcessGroup | None,
    weight: float = 1.0,
    everyone: dist.ProcessGroup | None = None,
) -> float:
    """Return sqrt(mean_i ||x_i - x_bar||^2), with x_i the concatenation of this rank's vectors. Collective.

    weight:   of this rank's x_i in the mean x_bar; all weights sum to n
    everyone: where x_i is spread over several ranks: the group of all of them, of all workers
    """
    if n == 1:
        return 0.0
    device = vectors[0].device if vectors else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float64, device=device)
    for vector in vectors:
        for chunk in vector.split(CHUNK):
            own = (torch.view_as_real(chunk) if chunk.is_complex() else chunk).double()
            mean = own * weight
            mean_over_ranks_([mean], n, group)
            square += (own - mean).square().sum()
    return float((sum_over_ranks(square, everyone or group) / n).sqrt())
