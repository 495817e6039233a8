"""Second moments that simulated workers share: an experiment, whose messages are not counted."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.optim import AccumAdamW
from common.simulate.methods import mix_


class SharedSecondMoments:
    """The second moments of all workers' AccumAdamWs, which attach theirs in the same order.

    how: "mean":   in every update all divide by the same v + (1 - b2) mean_j g_j^2, the current gradients included
         "mixing": after every update v_i <- sum_j w_ij v_j as parameters do: a worker divides by v_i + (1 - b2) g_i^2
    """

    def __init__(self, how: Literal["mean", "mixing"], workers: int) -> None:
        self._how = how
        self._optimizers: list[list[AccumAdamW]] = [[] for _ in range(workers)]

    def add(self, worker: int, optimizer: AccumAdamW) -> None:
        """Share what this optimizer of a worker has."""
        optimizer.init_state()
        self._optimizers[worker].append(optimizer)

    @torch.no_grad()
    def before_update(self) -> None:
        """Once all gradients are there: move v_i so that what the optimizer adds to it gives what all divide by."""
        for parameters, moments, b2 in self._rows() if self._how == "mean" else ():
            squares = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad.square() for p in parameters])
            torch._foreach_add_(moments, list((1 - b2) * (squares.mean(0) - squares)))

    @torch.no_grad()
    def after_update(self, matrix: np.ndarray) -> None:
        """Average v, of which the moves of `before_update` cancel then, or mix it with this matrix [N, N]."""
        if self._how == "mean":
            matrix = np.full_like(matrix, 1 / len(matrix))
        for _, moments, _ in self._rows():
            stacked = torch.stack(moments).flatten(1)
            mix_(stacked, matrix)
            torch._foreach_copy_(moments, [row.view_as(m) for row, m in zip(stacked, moments, strict=True)])

    def _rows(self) -> Iterator[tuple[tuple[nn.Parameter, ...], list[Tensor], float]]:
        """Yield every parameter of all workers, its second moments, and b2."""
        for optimizers in zip(*self._optimizers, strict=True):
            for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
                for parameters in zip(*(group["params"] for group in groups), strict=True):
                    states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
                    yield parameters, [state["exp_avg_sq"] for state in states], groups[0]["betas"][1]
