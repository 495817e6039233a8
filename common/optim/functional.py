"""The update of accumulated Adam as a function of lists of tensors (arXiv 2410.11998, Algorithm 4).

For each tensor, with gradient g, accumulator a, moments m and v, count k = 1, 2, ... of its updates and
window s:

    decay:   coupled    g <- g + weight_decay x          decoupled    x <- (1 - lr weight_decay) x
    a  <- a + g/s
    m' = m + (1-b1) g;   v' = v + (1-b2) g^2                                       (temporaries)
    c1 = 1 - b1^ceil(k/s);   c2 = 1 - b2^ceil(k/s)
    x  <- x - lr (m'/c1) / (sqrt(v'/c2) + eps)
    if k mod s == 0:   m <- b1 (m + (1-b1) a);   v <- b2 (v + (1-b2) a^2);   a <- 0

m and v are stored already multiplied by b1 and b2 for their next use. With s = 1 a is g: there is no accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.optim.foreach import chunked, scale_


def accum_adam_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    accumulation_steps: int,
    foreach: bool = True,
    fused: bool = False,
) -> None:
    """Make one update of accumulated Adam, in place on everything but ``grads`` (and ``steps``).

    The tensors are any floating-point tensors (parameters or segments of a flat vector alike); those at one
    index have one shape, dtype and device and start as x, g, 0, 0, 0. With ``accumulation_steps=1`` the
    accumulators are not looked at: pass (). ``steps[i]`` is k for index i, this update included: the caller
    counts, so that the segments of one parameter can be updated in several calls.
    ``foreach=False`` takes the plain loop, one tensor and one equation at a time; ``fused=True`` the compiled
    kernel, one pass over memory (``compiled.py``). Must be called under ``torch.no_grad()``. Raises ValueError
    when the lists differ in length.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs, *([accumulators] if accumulation_steps > 1 else [])]
    if any(len(entries) != len(steps) for entries in lists):
        raise ValueError(
            "accum_adam_update: expected lists of equal length, got "
            f"{[len(entries) for entries in lists]} tensors and {len(steps)} steps"
        )
    hyper = recurrence_arguments(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        accumulation_steps=accumulation_steps,
    )
    if fused:
        from common.optim.compiled import update_compiled  # brings the compiler, which takes seconds to import

        update_compiled(lists, steps, **hyper)
    elif foreach:
        for k, chunk in chunked(lists, keys=steps):
            _update_lists(*chunk, k=k, **hyper)
    else:
        for *tensors, k in zip(*lists, steps, strict=True):
            update_one(*tensors, k=k, **hyper)


def recurrence_arguments(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    accumulation_steps: int,
) -> dict[str, float]:
    """The same hyperparameters under the names of the recurrence, as ``update_one`` takes them."""
    return {
        "lr": lr,
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
        "s": accumulation_steps,
    }


def update_one(
    x: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    a: Tensor | None = None,
    *,
    k: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    s: int,
) -> None:
    """The recurrence of the module's docstring as it is written there: the reference for the fast version."""
    if weight_decay != 0:
        if decoupled:
            x.mul_(1 - lr * weight_decay)
        else:
            g = g + weight_decay * x
    mean = g if a is None else a.add_(g / s)
    m_next = m + (1 - beta1) * g
    v_next = v + (1 - beta2) * g * g
    window = -(-k // s)  # ceil(k / s)
    c1, c2 = 1 - beta1**window, 1 - beta2**window
    x.sub_(lr * (m_next / c1) / ((v_next / c2).sqrt() + eps))
    if k % s == 0:
        m.copy_(beta1 * (m + (1 - beta1) * mean))
        v.copy_(beta2 * (v + (1 - beta2) * mean * mean))
        if a is not None:
            a.zero_()


def _update_lists(
    xs: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    accumulators: list[Tensor] | None = None,
    *,
    k: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    s: int,
) -> None:
    """The same in few passes and two temporaries, for tensors of one device, one dtype and one count k.

    In reads and writes of the model's size: 17 (19 with decoupled, 20 with coupled decay, which takes a third
    temporary) and 11 more at the end of a window; 4 less with s = 1. torch's foreach AdamW has 20. The bias
    corrections cost none: lr (m'/c1) / (sqrt(v'/c2) + eps) = (lr sqrt(c2)/c1) m' / (sqrt(v') + eps sqrt(c2)).
    """
    if weight_decay != 0:
        if decoupled:
            scale_(xs, 1 - lr * weight_decay)
        else:
            gs = torch._foreach_add(gs, xs, alpha=weight_decay)  # a new list: decay must not reach .grad
    means = gs
    if accumulators is not None:
        means = accumulators
        torch._foreach_add_(means, gs, alpha=1 / s)
    window = -(-k // s)  # ceil(k / s)
    c1, sqrt_c2 = 1 - beta1**window, (1 - beta2**window) ** 0.5
    denominators = torch._foreach_addcmul(vs, gs, gs, value=1 - beta2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps * sqrt_c2)
    numerators = torch._foreach_add(ms, gs, alpha=1 - beta1)
    torch._foreach_addcdiv_(xs, numerators, denominators, value=-lr * sqrt_c2 / c1)
    if k % s == 0:
        torch._foreach_add_(ms, means, alpha=1 - beta1)
        scale_(ms, beta1)
        torch._foreach_addcmul_(vs, means, means, value=1 - beta2)
        scale_(vs, beta2)
        if accumulators is not None:
            torch._foreach_zero_(accumulators)
