"""Means of parameters and buffers over all workers, the workers' distance from them, and the weights of push-sum.

With push-sum (stochastic gradient push, Assran et al., ICML 2019) parameters hold z = x / w, and gradients are taken at
z. An update d applies to x, so z changes by d / w. The mean over the workers is that of x: sum_i w_i z_i / n.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.parallel.collectives import mean_over_ranks_, sendable, sum_over_ranks
from common.topology import Topology, weights_of

CHUNK = 1 << 22  # elements handled at once, so that extra memory stays small


@contextlib.contextmanager
def restored(module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors, bit for bit, at the end of the block, also after an exception.

    Buffers of the module that the block replaced by other tensors are put back.
    """
    saved = [tensor.clone() for tensor in tensors]
    buffers = [(part, dict(part.named_buffers(recurse=False, remove_duplicate=False))) for part in module.modules()]
    try:
        yield
    finally:
        for part, before in buffers:
            for name, buffer in before.items():
                setattr(part, name, buffer)
        for tensor, copy in zip(tensors, saved, strict=True):
            tensor.copy_(copy)
        torch.clear_autocast_cache()  # it may hold 16-bit copies of the tensors


def averageable_buffers(module: nn.Module) -> list[Tensor]:
    """Return the persistent floating-point or complex buffers, the statistics that workers collect, each once."""
    persistent = module.state_dict(keep_vars=True).keys()
    return [b for name, b in module.named_buffers() if name in persistent and (b.is_floating_point() or b.is_complex())]


def average_buffers_(buffers: Sequence[Tensor], n: int, group: dist.ProcessGroup | None) -> None:
    """Replace buffers by their means over the ranks, in one message for each dtype and device. Collective."""
    sent = [sendable(buffer.reshape(-1), group) for buffer in buffers]
    kinds = [(values.dtype, values.device) for values in sent]
    for kind in dict.fromkeys(kinds):
        same = [buffer for buffer, its in zip(buffers, kinds, strict=True) if its == kind]
        own = torch.cat([values for values, its in zip(sent, kinds, strict=True) if its == kind])
        mean_over_ranks_([flat := own.clone()], n, group)
        if not flat.isfinite().all():  # such as the sum of the lowest numbers, which masks hold; alike on all ranks
            mean_over_ranks_([flat := own.to(torch.promote_types(own.dtype, torch.float64))], n, group)
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

    weight:   weight of this rank's x_i in the mean x_bar; all weights sum to n
    everyone: group of all ranks of all workers, if each x_i is spread over several ranks
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


class Debiasing:
    """Divides a worker's updates by its push-sum weight. With a doubly stochastic topology w = 1, at no cost."""

    def __init__(self, topology: Topology, worker: int, vectors: Sequence[Tensor]) -> None:
        self._topology, self._worker, self._vectors = topology, worker, vectors
        self.needed = not topology.doubly_stochastic
        self._before: list[Tensor] = []

    def weight(self, clock: int) -> float:
        """Return w of this worker after `clock` rounds."""
        return 1.0 if not self.needed else float(weights_of(self._topology, clock)[self._worker])

    def remember(self) -> None:
        """Save the vectors before the update, after the merge that precedes it."""
        self._before = [vector.clone() for vector in self._vectors] if self.needed else []

    @torch.no_grad()
    def scale(self, clock: int) -> None:
        """Compute z <- z_before + (z - z_before) / w(clock), after the update."""
        weight = self.weight(clock)
        for vector, before in zip(self._vectors, self._before, strict=False):
            if weight != 1:
                vector.copy_(torch.lerp(before, vector, 1 / weight))
        self._before = []
