"""The optional argument of every optimizer's `step()`."""

from collections.abc import Callable

import torch


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return what `closure` returns, with gradients enabled; None if it is None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
