"""The update of accumulated Adam as a function of lists of tensors (arXiv 2410.11998, Algorithm 4).

For each tensor, with gradient g, accumulator a, moments m and v, count k = 1, 2, ... of its updates and window s:

    decay:   coupled    g <- g + weight_decay x          decoupled    x <- (1 - lr weight_decay) x
    a  <- a + g/s
    m' = m + (1-b1) g;   v' = v + (1-b2) g^2                                       (temporaries)
    c1 = 1 - b1^ceil(k/s);   c2 = 1 - b2^ceil(k/s)
    x  <- x - lr (m'/c1) / (sqrt(v'/c2) + eps)
    if k mod s == 0:   m <- b1 (m + (1-b1) a);   v <- b2 (v + (1-b2) a^2);   a <- 0

m and v are stored already multiplied by b1 and b2 for their next use. With s = 1 a is g: there is no accumulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.optim.foreach import scale_


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of one parameter group in one step, under the names of the recurrence.

    decoupled: whether weight decay shrinks x (AdamW) or is added to the gradient (Adam)
    s:         steps of a window
    """

    lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decoupled: bool
    s: int

    @classmethod
    def of(cls, group: Mapping[str, Any], decoupled: bool) -> Hyper:
        """Return the current hyperparameters of one of an optimizer's `param_groups`."""
        b1, b2 = group["betas"]
        return cls(group["lr"], b1, b2, group["eps"], group["weight_decay"], decoupled, group["accumulation_steps"])

    def ends_window(self, k: int) -> bool:
        """Return whether the k-th update is the last one of a window."""
        return k % self.s == 0

    def bias_corrections(self, k: int) -> tuple[float, float]:
        """Return (c1, c2) of the k-th update."""
        window = -(-k // self.s)  # ceil(k / s)
        return 1 - self.b1**window, 1 - self.b2**window


def update_one(x: Tensor, g: Tensor, m: Tensor, v: Tensor, a: Tensor | None = None, *, k: int, hyper: Hyper) -> None:
    """Compute the recurrence of the module's docstring as it is written there: the reference for the fast versions."""
    if hyper.weight_decay != 0:
        if hyper.decoupled:
            x.mul_(1 - hyper.lr * hyper.weight_decay)
        else:
            g = g + hyper.weight_decay * x
    mean = g if a is None else a.add_(g / hyper.s)
    m_next = m + (1 - hyper.b1) * g
    v_next = v + (1 - hyper.b2) * g * g
    c1, c2 = hyper.bias_corrections(k)
    x.sub_(hyper.lr * (m_next / c1) / ((v_next / c2).sqrt() + hyper.eps))
    if hyper.ends_window(k):
        m.copy_(hyper.b1 * (m + (1 - hyper.b1) * mean))
        v.copy_(hyper.b2 * (v + (1 - hyper.b2) * mean * mean))
        if a is not None:
            a.zero_()


def update_lists(
    xs: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    accumulators: list[Tensor] | None = None,
    *,
    k: int,
    hyper: Hyper,
) -> None:
    """Compute the same in few passes and two temporaries, for tensors of one device, one dtype and one count k.

    At each index the tensors have one shape. There are no accumulators with windows of one step.

    Reads and writes, in units of the model's size: 17 (19 with decoupled, 20 with coupled decay, which takes a third
    temporary) and 11 more at the end of a window; 4 fewer with s = 1. torch's foreach AdamW has 20. The bias
    corrections cost none: lr (m'/c1) / (sqrt(v'/c2) + eps) = (lr sqrt(c2)/c1) m' / (sqrt(v') + eps sqrt(c2)).
    """
    lr, b1, b2, eps, weight_decay = hyper.lr, hyper.b1, hyper.b2, hyper.eps, hyper.weight_decay
    if weight_decay != 0:
        if hyper.decoupled:
            scale_(xs, 1 - lr * weight_decay)
        else:
            gs = torch._foreach_add(gs, xs, alpha=weight_decay)  # a new list: decay must not reach .grad
    means = gs
    if accumulators is not None:
        means = accumulators
        torch._foreach_add_(means, gs, alpha=1 / hyper.s)
    c1, c2 = hyper.bias_corrections(k)
    sqrt_c2 = c2**0.5
    denominators = torch._foreach_addcmul(vs, gs, gs, value=1 - b2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps * sqrt_c2)
    numerators = torch._foreach_add(ms, gs, alpha=1 - b1)
    torch._foreach_addcdiv_(xs, numerators, denominators, value=-lr * sqrt_c2 / c1)
    if hyper.ends_window(k):
        torch._foreach_add_(ms, means, alpha=1 - b1)
        scale_(ms, b1)
        torch._foreach_addcmul_(vs, means, means, value=1 - b2)
        scale_(vs, b2)
        if accumulators is not None:
            torch._foreach_zero_(accumulators)
