"""Loss scaling with one decision per step for all workers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from common.parallel.collectives import explained, is_distributed


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips a step on all ranks or on none.

    A rank that skips alone would fall out of step with its peers: a skipped step commits no update, so the
    topology clock does not tick and the round in flight stays in flight. Here an inf or NaN on any rank makes
    every rank skip, and lower its scale, alike. Optimizers that handle `found_inf` themselves (fused=True) are not
    called at all on a skipped step.

    `step` and `all_finite` are collective: every rank calls one of them once per step, with the same number of
    optimizers. Several optimizers step after one decision:

        if scaler.all_finite(optimizers):
            for optimizer in optimizers:
                optimizer.step()
        scaler.update()
    """

    def __init__(self, device: str = "cuda", process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._group = process_group

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done yet, agree with all ranks, then step or skip."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if self.all_finite([optimizer]):
            return super().step(optimizer, *args, **kwargs)
        return None

    def all_finite(self, optimizers: Sequence[Optimizer]) -> bool:
        """Unscale all gradients that are still scaled; return whether they are finite on every rank. True if disabled.

        Raises RuntimeError if no parameter has a gradient.
        """
        if not self.is_enabled():
            return True
        flags = []
        for optimizer in optimizers:
            state = self._per_optimizer_states[id(optimizer)]
            if not state["found_inf_per_device"]:
                self.unscale_(optimizer)
                state = self._per_optimizer_states[id(optimizer)]
            flags += state["found_inf_per_device"].values()
        if not flags:
            raise RuntimeError("GradScaler.step: no parameter of the optimizer has a gradient; call backward() first")
        found = torch.stack([flag.to(flags[0].device) for flag in flags]).amax(0)
        if is_distributed():
            with explained("the decision whether to step"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        for flag in flags:  # update() reads these: every rank lowers its scale
            flag.copy_(found)
        return not found.item()
