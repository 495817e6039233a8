"""Quasi-global momentum SGD (arXiv 2102.04761), the QG-DmSGD of arXiv 2110.13363.

With worker i's gradient g_i (weight decay added), momentum m_i, parameters x_i and mixing weights w_ij, in this order:

    x_i' <- x_i - lr (beta m_i + g_i)                  what is sent
    y_i  <- sum_j w_ij x_j'                            the new parameters
    m_i  <- mu m_i + (1 - mu) (x_i - y_i) / lr

The momentum follows what mixing did to the parameters, an estimate of everybody's progress, instead of the worker's own
gradients; nothing but parameters is sent. lr is that of this step. With Nesterov's momentum (QG-DSGDm-N) a worker steps
along g_i + beta (beta m_i + g_i). The rule is that of the authors' code (github.com/epfml/quasi-global-momentum,
`decentralized_qg_sgd.py`); there 1 - mu is 0.1 by default and beta usually 0.9, so that mu = beta.

Without mixing, the step is quasi-hyperbolic momentum (arXiv 1810.06801) with a slower average than that of SGD with
momentum beta: one worker computes m <- (mu + (1 - mu) beta) m + (1 - mu) g.

This module is the optimizer of one worker: the sum belongs to the parallel engine, which sets `deferred` and then runs
descend(), mixes the parameters and runs track(). Alone, step() is both halves without mixing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from common.arguments import require_decay_rate, require_non_negative
from common.optim.closure import loss_of
from common.optim.foreach import scale_
from common.optim.momentum import MomentumOptimizer


class _Moved(NamedTuple):
    """What track() needs of a chunk that descend() moved: views of parameters and momenta, and the step's options."""

    params: list[Tensor]
    before: list[Tensor]
    momenta: list[Tensor]
    lr: float
    mu: float


class QGDmSGD(MomentumOptimizer):
    """SGD whose momentum is taken from the parameters before a step and after it, mixing included.

    params:       parameters or parameter groups; a group may override all options below
    lr:           learning rate; may change between steps. With lr = 0 nothing moves but by mixing, which says nothing
                  about gradients: the momentum is left as it is
    momentum:     beta, in [0, 1): the momentum's part of a step
    tracking:     mu, in [0, 1): the momentum's memory; None: beta
    nesterov:     whether the step looks ahead
    weight_decay: coefficient of the L2 penalty, added to the gradient (not to `.grad`)
    deferred:     set by an engine that calls track() itself; step() is then only descend()

    State of each parameter: `momentum_buffer`, of the parameter's shape, dtype and memory layout. A parameter without a
    gradient is skipped in both halves. Between the halves there is also a copy of the parameters. What 16-bit
    parameters or messages round off enters the momentum divided by lr. Raises ValueError for an argument out of range,
    and RuntimeError in `descend` for a sparse gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        tracking: float | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "tracking": tracking,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        _check_options(defaults)
        self._moved: list[_Moved] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickled or loaded state; a step in progress is forgotten."""
        super().__setstate__(state)
        self._moved = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its own options checked like the constructor's."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run descend() and, unless deferred, track(); return what `closure` returns, if given."""
        loss = loss_of(closure)
        self.descend()
        if not self.deferred:
            self.track()
        return loss

    @torch.no_grad()
    def descend(self) -> None:
        """Take the first half: x <- x - lr (beta m + g)."""
        self._moved = []
        for group, params, grads, momenta in self._chunks():
            beta, lr = group["momentum"], group["lr"]
            before = torch._foreach_mul(params, 1)  # a copy
            if group["weight_decay"] != 0:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            direction = torch._foreach_add(grads, momenta, alpha=beta)
            if group["nesterov"]:
                direction = torch._foreach_add(grads, direction, alpha=beta)
            torch._foreach_add_(params, direction, alpha=-lr)
            mu = beta if group["tracking"] is None else group["tracking"]
            self._moved.append(_Moved(params, before, momenta, lr, mu))

    @torch.no_grad()
    def track(self) -> None:
        """Take the second half, of what descend() moved: m <- mu m + (1 - mu) (x before - x now) / lr."""
        for params, before, momenta, lr, mu in self._moved:
            if lr == 0:
                continue
            torch._foreach_sub_(before, params)
            scale_(momenta, mu)
            torch._foreach_add_(momenta, before, alpha=(1 - mu) / lr)
        self._moved = []


def _check_options(options: dict[str, Any]) -> None:
    where = QGDmSGD.__name__
    require_non_negative(where, "lr", options["lr"])
    require_decay_rate(where, "momentum", options["momentum"])
    if options["tracking"] is not None:
        require_decay_rate(where, "tracking", options["tracking"])
    require_non_negative(where, "weight_decay", options["weight_decay"])
