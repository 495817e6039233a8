"""The update of accumulated Adam in one pass over memory, fused by torch.compile (CPU and GPU).

Memory traffic, in units of the model's size: 5 reads (x, g, m, v, a) and 2 writes (x, a); at the end of a window 2 more
writes (m, v); with windows of one step 4 reads and 3 writes, as in AdamW; 1 more read if peers' messages are merged in
the same pass. One kernel is compiled for each dtype, device and kind of step, whatever the shapes: it sees vectors, so
the time to compile does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from common.optim.functional import Hyper, update_one

KEPT = 64  # tensors of scalars that stay valid: more than the parameter groups and weights of one step need


class Vectors(NamedTuple):
    """What one update reads and writes, vectors [N] of one dtype and device: names as in `functional.py`.

    a:        None with windows of one step
    received: what peers sent, merged first as x <- own x + weight received; None: nothing to merge
    """

    x: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    a: Tensor | None = None
    received: Tensor | None = None


def update_compiled(vectors: Vectors, k: int, hyper: Hyper, own: float = 1.0, weight: float = 0.0) -> None:
    """Make the k-th update of x, m, v and a, in place. Raises RuntimeError where no kernel can be compiled."""
    if vectors.x.numel() < 2:  # the compiler would make separate kernels for these sizes
        x, g, m, v, a, received = vectors
        if received is not None:
            merge_(x, received, own, weight)
        update_one(x, g, m, v, a, k=k, hyper=hyper)
        return
    decay = "none" if hyper.weight_decay == 0 else "decoupled" if hyper.decoupled else "coupled"
    optional = (vectors.a, vectors.received)
    kernel = fused_kernel(hyper.ends_window(k), decay, *(tensor is not None for tensor in optional))
    scalars = scalars_of(k, hyper, own, weight, vectors.x.dtype, vectors.x.device)
    kernel(scalars, *vectors[:4], *(tensor for tensor in optional if tensor is not None))


@cache
def fused_kernel(end_of_window: bool, decay: str, accumulates: bool, merges: bool) -> Callable[..., None]:
    """Return `written_kernel` of the same arguments, compiled."""
    update = written_kernel(end_of_window, decay, accumulates, merges)
    # dynamo limits the variants (here dtypes and devices) of one code object, so each kernel gets its own.
    name = f"update_{decay}_{end_of_window}_{accumulates}_{merges}"
    update.__code__ = update.__code__.replace(co_name=name)
    # The compiler omits threads if the first vector it sees is short, also through its disk cache; with a number of
    # threads that is determined when the kernel runs, it always includes them.
    return torch.compile(update, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def written_kernel(end_of_window: bool, decay: str, accumulates: bool, merges: bool) -> Callable[..., None]:
    """Return the update of vectors [N], to be compiled: kernel(scalars, x, g, m, v, *a, *received).

    decay: "none", "coupled" or "decoupled"; the last two flags say which of the last two vectors exist. The scalars
    are those of `scalars_of`.
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
            # A zero computed from the accumulator: a constant would be written in a second pass over memory.
            others[0].copy_((mean < -math.inf).to(mean.dtype) if end_of_window else mean)

    return update


def scalars_of(k: int, hyper: Hyper, own: float, weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values that change from step to step as one tensor [10]: numbers would be compiled in.

    lr (m'/c1) / (sqrt(v'/c2) + eps) = (lr sqrt(c2)/c1) m' / (sqrt(v') + eps sqrt(c2)), as in `functional.py`. The
    buckets of a step share the tensor; it is valid until `KEPT` others were requested.
    """
    # float32 for 16-bit parameters too: in bfloat16 0.999 would be 1.
    known, unused = _places(torch.promote_types(dtype, torch.float32), device)
    key = (k, hyper, own, weight)
    if key not in known:
        place = unused.pop() if unused else known.pop(next(iter(known)))  # the oldest
        c1, c2 = hyper.bias_corrections(k)
        sqrt_c2 = c2**0.5
        decay_factor = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
        step = [hyper.lr * sqrt_c2 / c1, hyper.eps * sqrt_c2]
        rates = [1 - hyper.b1, 1 - hyper.b2, hyper.b1, hyper.b2, 1 / hyper.s]
        values = [*step, *rates, decay_factor, own, weight]
        # To a GPU from pinned memory: from any other, the copy would wait until the GPU has finished all earlier work.
        made = torch.tensor(values, dtype=place.dtype, device="cpu", pin_memory=device.type == "cuda")
        known[key] = place.copy_(made, non_blocking=True)
    return known[key]


@cache
def _places(dtype: torch.dtype, device: torch.device) -> tuple[dict[tuple, Tensor], list[Tensor]]:
    """Return scalars by the arguments they belong to, the oldest first, and unused tensors for further ones.

    A new tensor that lasts from one step into the next fragments the memory that gradients free; with 64 of them the
    process grows by a gradient every few steps.
    """
    return {}, [torch.empty(10, dtype=dtype, device=device) for _ in range(KEPT)]


def merge_(x: Tensor, received: Tensor, own: float, weight: float) -> None:
    """Compute x <- own x + weight received, in place."""
    x.copy_(own * x + weight * received)
