"""The update of accumulated Adam in one pass over memory, fused by torch.compile (CPU and GPU).

In reads and writes of the model's size: 5 reads (x, g, m, v, a) and 2 writes (x, a); at the end of a window 2
more (m, v); with windows of one step 4 reads and 3 writes, as AdamW has; 1 more where what arrived from peers is
merged in the same pass. One kernel is compiled for each dtype, device and kind of step, whatever the shapes: it sees
every tensor as a vector, so the time to compile does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from common.optim.functional import update_one


@cache
def fused_kernel(end_of_window: bool, decay: str, merges: bool, accumulates: bool) -> Callable[..., None]:
    """The compiled update of vectors [N]: kernel(scalars, x, g, m, v, *a, *merged), in place on x, m, v, a.

    decay:       "none", "coupled" or "decoupled"; scalars: see ``scalars_of``
    merges:      first x <- weights[0] x + weights[1] r, with merged = (r, weights)
    accumulates: whether there is an accumulator a; windows of one step have none
    """

    def update(scalars: Tensor, x: Tensor, g: Tensor, m: Tensor, v: Tensor, *others: Tensor) -> None:
        step_size, eps, one_minus_b1, one_minus_b2, b1, b2, inverse_s, decay_factor = scalars.unbind()
        new_x = x
        if merges:
            received, weights = others[-2:]
            new_x = weights[0] * x + weights[1] * received
        if decay == "coupled":
            g = g + decay_factor * new_x
        elif decay == "decoupled":
            new_x = new_x * decay_factor
        mean = others[0] + g * inverse_s if accumulates else g
        numerator = m + one_minus_b1 * g
        denominator = (v + one_minus_b2 * g * g).sqrt() + eps
        x.copy_(new_x - step_size * numerator / denominator)
        if end_of_window:
            m.copy_(b1 * (m + one_minus_b1 * mean))
            v.copy_(b2 * (v + one_minus_b2 * mean * mean))
        if accumulates:
            # A zero that looks at the accumulator: a constant would be written in a second pass over memory.
            others[0].copy_((mean < -math.inf).to(mean.dtype) if end_of_window else mean)

    # A code object of its own: dynamo bounds the variants (here dtypes and devices) of each.
    update.__code__ = update.__code__.replace(co_name=f"update_{decay}_{end_of_window}_{merges}_{accumulates}")
    return torch.compile(update, dynamic=True, fullgraph=True)


def scalars_of(
    k: int,
    like: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    s: int,
) -> Tensor:
    """What changes from step to step, as one tensor [8]: numbers would be compiled in.

    lr (m'/c1) / (sqrt(v'/c2) + eps) = (lr sqrt(c2)/c1) m' / (sqrt(v') + eps sqrt(c2)), as in ``functional.py``.
    """
    window = -(-k // s)  # ceil(k / s)
    c1, sqrt_c2 = 1 - beta1**window, (1 - beta2**window) ** 0.5
    decay_factor = 1 - lr * weight_decay if decoupled else weight_decay
    values = [lr * sqrt_c2 / c1, eps * sqrt_c2, 1 - beta1, 1 - beta2, beta1, beta2, 1 / s, decay_factor]
    # float32 for 16-bit parameters too: there 0.999 would be 1.
    return torch.tensor(values, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


class FusedUpdate:
    """One update with these hyperparameters (keywords as of ``update_one``), a kernel call for each vector."""

    def __init__(self, **hyper: float) -> None:
        self._hyper = hyper
        self._decay = "none" if hyper["weight_decay"] == 0 else "decoupled" if hyper["decoupled"] else "coupled"
        self._scalars: dict[tuple, Tensor] = {}

    def __call__(self, vectors: Sequence[Tensor], k: int, merged: tuple[Tensor, float, float] | None = None) -> None:
        """Update x, m, v, a of ``vectors`` (x, g, m, v, a) [N] in place, for the k-th time; no a with s = 1.

        merged: (r [N], own, weight): first x <- own x + weight r. RuntimeError where no kernel can be compiled.
        """
        x = vectors[0]
        if x.numel() < 2:  # the compiler would make kernels of their own for these sizes
            if merged is not None:
                merge_(x, *merged)
            update_one(*vectors, k=k, **self._hyper)
            return
        key = (k, x.dtype, x.device)
        if key not in self._scalars:
            self._scalars[key] = scalars_of(k, x, **self._hyper)
        arguments = () if merged is None else (merged[0], self._weights(x, *merged[1:]))
        s = self._hyper["s"]
        kernel = fused_kernel(k % s == 0, self._decay, merges=merged is not None, accumulates=s > 1)
        kernel(self._scalars[key], *vectors, *arguments)

    def _weights(self, like: Tensor, own: float, weight: float) -> Tensor:
        key = (own, weight, like.dtype, like.device)
        if key not in self._scalars:
            dtype = torch.promote_types(like.dtype, torch.float32)
            self._scalars[key] = torch.tensor([own, weight], dtype=dtype, device=like.device)
        return self._scalars[key]


def merge_(x: Tensor, received: Tensor, own: float, weight: float) -> None:
    """x <- own x + weight received, in place."""
    x.copy_(own * x + weight * received)


def update_compiled(lists: Sequence[Sequence[Tensor]], steps: Sequence[int], **hyper: float) -> None:
    """One update of (params, grads, exp_avgs, exp_avg_sqs, accumulators), a kernel call for each parameter.

    lists: without accumulators where s = 1. steps: k of each parameter. RuntimeError where no kernel can be compiled.
    """
    update = FusedUpdate(**hyper)
    for *tensors, k in zip(*lists, steps, strict=True):
        update(as_vectors(tensors), k)
        increment_version(tensors[0])  # as any write in place does: autograd and the engine look at it


def as_vectors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory as vectors [N]: parameter and state have one dense layout, a gradient may have to be copied."""
    x, g, *state = tensors
    if g.stride() != x.stride():
        g = torch.empty_like(x).copy_(g)
    return [span(t, 0, t.numel()) for t in (x, g, *state)]


def span(dense: Tensor, start: int, stop: int) -> Tensor:
    """Elements start..stop of the memory of a dense tensor, as a vector.

    Not a view: the compiler would make a kernel for each number of dimensions of what it is a view of.
    """
    return dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset() + start, (stop - start,))
