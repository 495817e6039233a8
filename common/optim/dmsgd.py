"""Decentralized momentum SGD (arXiv 2110.13363, Algorithm 1).

With worker i's gradient g_i (weight decay added), momentum m_i, parameters x_i and mixing weights w_ij, in
this order:

    momentum_mixing=True     m_i <- sum_j w_ij (beta m_j + g_j);   x_i <- sum_j w_ij (x_j - lr m_j)
    momentum_mixing=False    m_i <- beta m_i + g_i;                x_i <- sum_j w_ij (x_j - lr m_j)

The first is Algorithm 1 as it is commonly written down; we could not check it against the paper. The second keeps the
momentum local ("vanilla DmSGD"), as the authors' CIFAR-10 script does, which uses torch's SGD and combines after the
step.

This module is the optimizer of one worker: the sums belong to the parallel engine, which sets `deferred`
and then runs accumulate(), mixes `momentum_buffer`, runs descend() and mixes the parameters. Alone, step()
is both halves without mixing, and equals `torch.optim.SGD` with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from common.arguments import require_decay_rate, require_non_negative
from common.optim.closure import loss_of
from common.optim.foreach import scale_
from common.optim.momentum import MomentumOptimizer


class DmSGD(MomentumOptimizer):
    """SGD with momentum whose step can be taken in two halves, to mix the momentum between them.

    params:          parameters or parameter groups; a group may override lr, momentum and weight_decay
    lr:              learning rate; may change between steps
    momentum:        beta, in [0, 1)
    weight_decay:    coefficient of the L2 penalty, added to the gradient (not to `.grad`)
    momentum_mixing: whether an engine should mix the momentum too
    deferred:        set by an engine that calls descend() itself; step() is then only accumulate()

    State of each parameter: `momentum_buffer`, of the parameter's shape, dtype and memory layout. A parameter without a
    gradient is skipped in both halves. Raises ValueError for an argument out of range, and RuntimeError in `accumulate`
    for a sparse gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        momentum_mixing: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._check_options(defaults)
        self.momentum_mixing = momentum_mixing
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its own options checked like the constructor's."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def init_state(self) -> None:
        """Allocate the missing state of all parameters now (zeros), not at their first gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                self._momentum_of(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run accumulate() and, unless deferred, descend(); return what `closure` returns, if given."""
        loss = loss_of(closure)
        self.accumulate()
        if not self.deferred:
            self.descend()
        return loss

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take the first half, local: m <- momentum m + (g + weight_decay x)."""
        for group, params, grads, momenta in self._chunks():
            if group["weight_decay"] != 0:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            scale_(momenta, group["momentum"])
            torch._foreach_add_(momenta, grads)

    @torch.no_grad()
    def descend(self) -> None:
        """Take the second half, local: x <- x - lr m, for the parameters that (still) have a gradient."""
        for group, params, _, momenta in self._chunks():
            torch._foreach_add_(params, momenta, alpha=-group["lr"])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy keeps."""
        return {**super().__getstate__(), "momentum_mixing": self.momentum_mixing}

    def _check_options(self, options: dict[str, Any]) -> None:
        where = type(self).__name__
        require_non_negative(where, "lr", options["lr"])
        require_decay_rate(where, "momentum", options["momentum"])
        require_non_negative(where, "weight_decay", options["weight_decay"])
