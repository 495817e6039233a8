"""Loss scaling for gossip: every worker deals with its own overflows, and nobody waits."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from common.dtensors import local
from common.torch_internals import sparse_values

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gossip: on an overflow the worker takes its gradients as zero and steps all the same.

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    If any gradient of an optimizer is inf or NaN, all of them are zero in this step:
    x_i(t+1) = sum_j W_ij(t) x_j(t) + d_i(t), where d_i(t) is the displacement of a zero gradient; momentum and weight
    decay act as usual. The worker mixes, and its clock and its schedule tick, as everybody's do. Only its own scale
    falls. Scales of workers may differ, since gradients are unscaled before they are used.

    Other rules cost more. A worker that skips the step alone, as with torch's scaler, misses a round that its peers
    count on; to skip it on all workers takes an all-reduce in every step, a barrier that brings back the jitter which
    gossip hides. No displacement at all, d_i(t) = 0, would have the host wait for the flag before it calls the
    optimizer, or every optimizer read the flag on the device.

    Ranks that share a replica average their gradients in backward, so they see the same overflows and their scales
    stay equal; where they hold shards of gradients, torch's `unscale_` tells all of them what one has found. So do all
    ranks under all-reduce, where torch's own scaler works too, with one optimizer: it skips the step on all ranks.

    Nothing here is collective or waits for the device. Arguments and state are those of `torch.amp.GradScaler`.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; then make all of them zero if one is inf or NaN.

        Call it before clipping, whose norm is then finite; at most once before each `step`.
        """
        super().unscale_(optimizer)
        if self.is_enabled():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            zero_if_(self._found_inf_per_device(optimizer).values(), gradients)

    def step(self, optimizer: Optimizer) -> float | None:
        """Unscale if that was not done yet, then step. Unlike torch's it never skips, and it takes no closure.

        Raises RuntimeError if called twice without `update`.
        """
        if self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is not OptState.UNSCALED:
                self.unscale_(optimizer)
            state["stage"] = OptState.STEPPED
        return optimizer.step()


@torch.no_grad()
def zero_if_(flags: Collection[Tensor], tensors: Iterable[Tensor]) -> None:
    """Make dense or sparse floating-point tensors zero, in place and on their devices, if any flag [] is not zero.

    Of DTensors it is the local parts; flags are those of the whole.
    """
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = sparse_values(tensor) if tensor.is_sparse else local(tensor)
        # As an integer: 0 * NaN is NaN, but the bits of any number times 0 or 1 are those of 0 or of the number.
        bits = values.view(_INTEGERS[values.element_size()])
        lists.setdefault((bits.device, bits.dtype), []).append(bits)
    for (device, dtype), bits in lists.items():
        found = sum(flag.to(device, non_blocking=True) for flag in flags)
        torch._foreach_mul_(bits, (found == 0).to(dtype))
