"""SGD with momentum whose step can be taken in two halves, so that a parallel engine can mix in between.

Both optimizers are local to one worker: sums over workers are left to the engine, which sets `deferred`; `step` is then
only the first half. With worker i's gradient g_i (weight decay added), momentum m_i, parameters x_i and mixing weights
w_ij, in this order:

DmSGD (decentralized momentum SGD, arXiv 2110.13363, Algorithm 1)

    momentum_mixing=True     m_i <- sum_j w_ij (beta m_j + g_j);   x_i <- sum_j w_ij (x_j - lr m_j)
    momentum_mixing=False    m_i <- beta m_i + g_i;                x_i <- sum_j w_ij (x_j - lr m_j)

The first is Algorithm 1 as it is commonly written down; we could not check it against the paper. The second keeps the
momentum local ("vanilla DmSGD"), as the authors' CIFAR-10 script does, which uses torch's SGD and combines after the
step. The engine runs accumulate(), mixes `momentum_buffer`, runs descend() and mixes the parameters.

QGDmSGD (quasi-global momentum SGD, arXiv 2102.04761, the QG-DmSGD of arXiv 2110.13363)

    x_i' <- x_i - lr (beta m_i + g_i)                  what is sent
    y_i  <- sum_j w_ij x_j'                            the new parameters
    m_i  <- mu m_i + (1 - mu) (x_i - y_i) / lr

The momentum follows what mixing did to the parameters, an estimate of the progress of all workers, instead of the
worker's own gradients; nothing but parameters is sent. lr is this step's. With Nesterov's momentum (QG-DSGDm-N) a
worker steps along g_i + beta (beta m_i + g_i). The rule follows the authors' code
(github.com/epfml/quasi-global-momentum, `decentralized_qg_sgd.py`); there 1 - mu is 0.1 by default and beta usually
0.9, so that mu = beta. The engine runs descend(), mixes the parameters and runs track(). Without mixing, the step is
quasi-hyperbolic momentum (arXiv 1810.06801), whose average is slower than in SGD with momentum beta: one worker
computes m <- (mu + (1 - mu) beta) m + (1 - mu) g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from common.arguments import require_decay_rate, require_non_negative
from common.dtensors import count_writes, local
from common.optim.foreach import check_keys, chunked, dense_grad, loss_of, scale_
from common.torch_internals import disable_dynamo


class MomentumOptimizer(Optimizer):
    """An optimizer whose state is `momentum_buffer`, of each parameter's shape, dtype and memory layout.

    deferred: set by an engine that takes the second half of a step itself, after mixing
    """

    deferred: bool = False  # a copy is attached to nothing, so it starts from this value

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its own options checked like the constructor's."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a state dict; refuse the state of another optimizer."""
        where = type(self).__name__
        expected = (state.get("defaults") or self.defaults).keys() - {"differentiable"}  # which loading adds
        for index, group in enumerate(state["param_groups"]):
            check_keys(where, f"parameter group {index}", group, expected)
        for param_state in filter(None, state["state"].values()):
            check_keys(where, "the state of a parameter", param_state, ("momentum_buffer",))
        super().__setstate__(state)

    def _check_options(self, options: dict[str, Any]) -> None:
        where = type(self).__name__
        require_non_negative(where, "lr", options["lr"])
        require_decay_rate(where, "momentum", options["momentum"])
        if options.get("tracking") is not None:
            require_decay_rate(where, "tracking", options["tracking"])
        require_non_negative(where, "weight_decay", options["weight_decay"])

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield (group, parameters, gradients, momenta) over all parameters that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [dense_grad(type(self).__name__, param) for param in params]
            momenta = [self._momentum_of(param) for param in params]
            count_writes(params)
            for _, chunk in chunked((params, grads, momenta), keys=[None] * len(params)):
                yield group, *chunk

    def _momentum_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if state.get("momentum_buffer") is None:  # None: from a torch.optim.SGD without momentum
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["momentum_buffer"]


class DmSGD(MomentumOptimizer):
    """SGD with momentum whose momentum can be mixed before the parameters move; alone it is `torch.optim.SGD`.

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

    _moving: Sequence[tuple[list[Tensor], float]] = ()  # parameters that accumulate() took in, and the lr of then

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_mixing: bool = True
    ) -> None:
        self.momentum_mixing = momentum_mixing
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def init_state(self) -> None:
        """Allocate the missing state of all parameters now (zeros), not at their first gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                self._momentum_of(param)

    @disable_dynamo  # it would lose what step() notes
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
        self._moving = [
            (params, group["lr"])
            for group in self.param_groups
            if (params := [param for param in group["params"] if param.grad is not None])
        ]
        for group, params, grads, momenta in self._chunks():
            if group["weight_decay"] != 0:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            scale_(momenta, group["momentum"])
            torch._foreach_add_(momenta, grads)

    @torch.no_grad()
    def descend(self) -> None:
        """Take the second half, local: x <- x - lr m, for what accumulate() took in, with the lr of then.

        In between, gradients may have been dropped, schedules stepped, and momenta moved to other memory.
        """
        for params, lr in self._moving:
            momenta = [local(self.state[param]["momentum_buffer"]) for param in params]
            torch._foreach_add_([local(param) for param in params], momenta, alpha=-lr)
            count_writes(params)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy keeps."""
        return {**super().__getstate__(), "momentum_mixing": self.momentum_mixing}


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
    lr:           learning rate; may change between steps. With lr = 0 only mixing moves parameters, which says nothing
                  about gradients: the momentum is left unchanged
    momentum:     beta, in [0, 1): the momentum's part of a step
    tracking:     mu, in [0, 1): the momentum's memory; None: beta
    nesterov:     whether the step looks ahead
    weight_decay: coefficient of the L2 penalty, added to the gradient (not to `.grad`)
    deferred:     set by an engine that calls track() itself; step() is then only descend()

    State of each parameter: `momentum_buffer`, of the parameter's shape, dtype and memory layout. A parameter without a
    gradient is skipped in both halves. Between the halves it also holds a copy of the parameters. Rounding errors of
    16-bit parameters or messages enter the momentum divided by lr. Raises ValueError for an argument out of range,
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
        self._moved: list[_Moved] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickled or loaded state; a step in progress is forgotten."""
        super().__setstate__(state)
        self._moved = []

    @disable_dynamo  # it would lose what step() notes
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
