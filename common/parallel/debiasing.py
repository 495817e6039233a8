"""What push-sum asks of a worker besides mixing (stochastic gradient push, Assran et al., ICML 2019).

Parameters hold z = x / w, at which gradients are taken. An update d belongs to x: z changes by d / w. And the mean over
the workers is that of x: sum_i w_i z_i / n.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.topology import Topology, weights_of


class Debiasing:
    """One worker's part in it. With a doubly stochastic topology, where w = 1, it costs nothing."""

    def __init__(self, topology: Topology, worker: int, vectors: Sequence[Tensor]) -> None:
        self._topology, self._worker, self._vectors = topology, worker, vectors
        self.needed = not topology.doubly_stochastic
        self._before: list[Tensor] = []

    def weight(self, clock: int) -> float:
        """w of this worker after `clock` rounds."""
        return 1.0 if not self.needed else float(weights_of(self._topology, clock)[self._worker])

    def remember(self) -> None:
        """Before the update, after what merges first."""
        self._before = [vector.clone() for vector in self._vectors] if self.needed else []

    @torch.no_grad()
    def scale(self, clock: int) -> None:
        """After the update: z <- z_before + (z - z_before) / w(clock)."""
        weight = self.weight(clock)
        for vector, before in zip(self._vectors, self._before, strict=False):
            if weight != 1:
                vector.copy_(torch.lerp(before, vector, 1 / weight))
        self._before = []
