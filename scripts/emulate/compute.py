"""Forward and backward replaced by waits, with gradients of the right shapes.

Several ranks on few cores take turns at computing, which no cluster does. A wait leaves the cores to the engine, as an
accelerator does.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.planner.conditions import Condition

EVEN = Condition("all alike")


class EmulatedCompute(nn.Module):
    """The parameters of `module` (the same objects), with a forward and a backward that wait.

    compute_ms:     of forward and backward together, shared among the parameters by their size
    backward_share: of it
    condition:      how the time varies from step to step
    factor:         how much longer a slow host takes
    seed:           of the variation, such as (seed, rank)

    `forward()` returns a scalar; its backward gives every parameter a fixed random gradient, last parameter first.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_ms: float,
        backward_share: float = 2 / 3,
        *,
        condition: Condition = EVEN,
        factor: float = 1.0,
        seed: Sequence[int] = (0, 0),
    ) -> None:
        super().__init__()
        self.module = module
        self._waiter = Waiter()
        self._variation = condition.variation_of(factor, seed)
        generator = torch.Generator().manual_seed(0)
        trained = [p for p in module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in trained)
        self._layers = []
        for parameter in trained:
            seconds = compute_ms / 1000 * parameter.numel() / total
            gradient = torch.randn(parameter.shape, generator=generator).mul_(0.01).to(parameter.device)
            times = seconds * (1 - backward_share), seconds * backward_share
            self._layers.append((parameter, gradient, *times))

    def forward(self) -> Tensor:
        """Return a scalar with gradient, after the forward's share of the time."""
        activation = torch.zeros((), requires_grad=True)
        longer = self._variation.draw().item()
        for parameter, gradient, *times in self._layers:
            forward_s, backward_s = (longer * seconds for seconds in times)
            activation = _Layer.apply(activation, parameter, gradient, forward_s, backward_s, self._waiter)
        return activation


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


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        activation: Tensor,
        parameter: Tensor,
        gradient: Tensor,
        forward_s: float,
        backward_s: float,
        waiter: Waiter,
    ) -> Tensor:
        ctx.rest = gradient, backward_s, waiter
        waiter.wait(forward_s)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple:
        gradient, backward_s, waiter = ctx.rest
        waiter.wait(backward_s)
        return incoming, gradient, None, None, None, None
