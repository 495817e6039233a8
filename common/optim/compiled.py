"""The update of accumulated Adam in one pass over memory, fused by torch.compile (CPU and GPU).

In reads and writes of the model's size: 5 reads (x, g, m, v, a) and 2 writes (x, a); at the end of a window 2
more (m, v); with windows of one step 4 reads and 3 writes, as AdamW has; 1 more where what arrived from peers is
merged in the same pass. One kernel is compiled for each dtype, device and kind of step, whatever the shapes: it sees
every tensor as a vector, so the time to compile does not grow with the model.

A call of a kernel takes as long as the update of some thirty thousand elements: small tensors are copied together, so
that one call updates them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from common.optim.functional import update_one

JOINED_ELEMENTS = 8192  # of a vector, up to which copying it takes less time than a call


@cache
def fused_kernel(end_of_window: bool, decay: str, merges: bool, accumulates: bool) -> Callable[..., None]:
    """The compiled update of vectors [N]: kernel(scalars, x, g, m, v, *a, *r), in place on x, m, v, a.

    decay:       "none", "coupled" or "decoupled"; scalars: see ``scalars_of``
    merges:      first x <- own x + weight r
    accumulates: whether there is an accumulator a; windows of one step have none
    """

    def update(scalars: Tensor, x: Tensor, g: Tensor, m: Tensor, v: Tensor, *others: Tensor) -> None:
        step_size, eps, one_minus_b1, one_minus_b2, b1, b2, inverse_s, decay_factor, own, weight = scalars.unbind()
        new_x = own * x + weight * others[-1] if merges else x
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
    # The compiler leaves threads out where the vector it first meets is short, also from its disk cache; asked for
    # threads that are counted when the kernel runs, it always puts them in.
    return torch.compile(update, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


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
    own: float,
    weight: float,
) -> Tensor:
    """What changes from step to step, as one tensor [10]: numbers would be compiled in.

    lr (m'/c1) / (sqrt(v'/c2) + eps) = (lr sqrt(c2)/c1) m' / (sqrt(v') + eps sqrt(c2)), as in ``functional.py``.
    """
    window = -(-k // s)  # ceil(k / s)
    c1, sqrt_c2 = 1 - beta1**window, (1 - beta2**window) ** 0.5
    decay_factor = 1 - lr * weight_decay if decoupled else weight_decay
    values = [lr * sqrt_c2 / c1, eps * sqrt_c2, 1 - beta1, 1 - beta2, beta1, beta2, 1 / s, decay_factor, own, weight]
    # float32 for 16-bit parameters too: there 0.999 would be 1.
    return torch.tensor(values, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


class FusedUpdate:
    """One update with these hyperparameters (keywords as of ``update_one``)."""

    def __init__(self, **hyper: float) -> None:
        self._hyper = hyper
        self._decay = "none" if hyper["weight_decay"] == 0 else "decoupled" if hyper["decoupled"] else "coupled"
        self._scalars: dict[tuple, Tensor] = {}

    def __call__(self, rows: Sequence[Sequence[Tensor]], k: int, weights: tuple[float, float] | None = None) -> None:
        """Update x, m, v, a of every row (x, g, m, v, a, r) of vectors [N] in place, for the k-th time.

        rows:    all of one dtype and device; no a with s = 1, r only with weights
        weights: (own, weight): first x <- own x + weight r

        RuntimeError where no kernel can be compiled.
        """
        small = [row for row in rows if row[0].numel() <= JOINED_ELEMENTS]
        if len(small) < 2:
            small = []
        for row in rows:
            if not small or row[0].numel() > JOINED_ELEMENTS:
                self._update(row, k, weights)
        if small:
            self._update_joined(small, k, weights)

    def _update(self, row: Sequence[Tensor], k: int, weights: tuple[float, float] | None) -> None:
        x, s = row[0], self._hyper["s"]
        own, weight = weights or (1.0, 0.0)
        if x.numel() < 2:  # the compiler would make kernels of their own for these sizes
            if weights is not None:
                *row, received = row
                merge_(x, received, own, weight)
            update_one(*row, k=k, **self._hyper)
            return
        key = (k, own, weight, x.dtype, x.device)
        if key not in self._scalars:
            self._scalars[key] = scalars_of(k, x, **self._hyper, own=own, weight=weight)
        kernel = fused_kernel(k % s == 0, self._decay, merges=weights is not None, accumulates=s > 1)
        kernel(self._scalars[key], *row)

    def _update_joined(self, rows: Sequence[Sequence[Tensor]], k: int, weights: tuple[float, float] | None) -> None:
        columns = list(zip(*rows, strict=True))
        joined = [torch.cat(column) for column in columns]
        self._update(joined, k, weights)
        s, sizes = self._hyper["s"], [row[0].numel() for row in rows]
        for index in (0, *((2, 3) if k % s == 0 else ()), *((4,) if s > 1 else ())):  # x, m, v, a as far as written
            torch._foreach_copy_(columns[index], joined[index].split(sizes))


def merge_(x: Tensor, received: Tensor, own: float, weight: float) -> None:
    """x <- own x + weight received, in place."""
    x.copy_(own * x + weight * received)


def update_compiled(lists: Sequence[Sequence[Tensor]], steps: Sequence[int], **hyper: float) -> None:
    """One update of (params, grads, exp_avgs, exp_avg_sqs, accumulators).

    lists: without accumulators where s = 1. steps: k of each parameter. RuntimeError where no kernel can be compiled.
    """
    update = FusedUpdate(**hyper)
    alike: dict[tuple, list[list[Tensor]]] = {}
    for x, g, *state, k in zip(*lists, steps, strict=True):
        row = [span(tensor, 0, tensor.numel()) for tensor in (x, as_laid_out(g, x), *state)]
        alike.setdefault((k, x.dtype, x.device), []).append(row)
        increment_version(x)  # as any write in place does: autograd and the engine look at it
    for (k, _, _), rows in alike.items():
        update(rows, k)


def as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, copied if need be: parameter and state have one dense layout."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def span(dense: Tensor, start: int, stop: int) -> Tensor:
    """Elements start..stop of the memory of a dense tensor, as a vector.

    Not a view: the compiler would make a kernel for each number of dimensions of what it is a view of.
    """
    return dense.data.as_strided_((stop - start,), (1,), dense.storage_offset() + start)
