"""Forward and backward replaced by waits, with gradients of the right shapes.

Several ranks on few cores take turns at computing, which no cluster does. A wait leaves the cores to the engine, as an
accelerator does.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from common.planner.cluster import Variation

BACKWARD_SHARE = 2 / 3  # of a step's waits


class Waiter:
    """Short sleeps that are exact on average: if one takes too long, later ones are shorter."""

    SHORTEST_S = 0.001

    def __init__(self) -> None:
        self._owed = 0.0

    def wait(self, seconds: float) -> None:
        """Wait, now or together with later calls."""
        self._owed += seconds
        if self._owed >= self.SHORTEST_S:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin


class EmulatedCompute(nn.Module):
    """The parameters of `module` (the same objects), with a forward and a backward that wait.

    compute_ms:     of forward and backward together, shared among the parameters by their size
    variation:      of this time from step to step; None: always the same

    `forward()` returns a scalar; its backward gives every parameter a fixed random gradient, last parameter first.
    """

    def __init__(self, module: nn.Module, compute_ms: float, variation: Variation | None = None) -> None:
        super().__init__()
        self.module = module
        self._waiter = Waiter()
        self._variation = variation or Variation(seed=(0, 0))
        generator = torch.Generator().manual_seed(0)
        trained = [p for p in module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in trained)
        self._layers = []
        for parameter in trained:
            gradient = torch.randn(parameter.shape, generator=generator).mul_(0.01).to(parameter.device)
            self._layers.append((parameter, gradient, compute_ms / 1000 * parameter.numel() / total))

    def forward(self) -> Tensor:
        """Return a scalar with gradient, after the forward's share of the time."""
        activation = torch.zeros((), requires_grad=True)
        longer = self._variation.draw().item()
        for parameter, gradient, seconds in self._layers:
            activation = _Layer.apply(activation, parameter, gradient, longer * seconds, self._waiter)
        return activation


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, parameter: Tensor, gradient: Tensor, seconds: float, waiter: Waiter
    ) -> Tensor:
        ctx.rest = gradient, seconds, waiter
        waiter.wait(seconds * (1 - BACKWARD_SHARE))
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple:
        gradient, seconds, waiter = ctx.rest
        waiter.wait(seconds * BACKWARD_SHARE)
        return incoming, gradient, None, None, None
