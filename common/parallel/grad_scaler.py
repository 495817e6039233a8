"""Loss scaling for gossip: every worker deals with its own overflows, and no worker waits."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from common.dtensors import local
from common.torch_internals import sparse_values

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gossip: after an overflow a worker treats its gradients as 0 and steps all the same.

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    If any gradient of an optimizer is inf or NaN, all of them are zero in this step:
    x_i(t+1) = sum_j W_ij(t) x_j(t) + d_i(t), where d_i(t) is the displacement of a zero gradient; momentum and weight
    decay act as usual. The worker mixes, and its clock and schedule tick, as on every worker. Only its own scale
    falls. Scales of workers may differ, since gradients are unscaled before they are used.

    Other rules cost more. A worker that skips the step alone, as with torch's scaler, misses a round that its peers
    count on; skipping it on all workers takes an all-reduce in every step, a barrier that brings back the jitter that
    gossip hides. With no displacement at all, d_i(t) = 0, the host would have to wait for the flag before it calls the
    optimizer, or every optimizer would have to read the flag on the device.

    Ranks that share a replica average their gradients in backward, so they see the same overflows and their scales
    stay equal; where they hold shards of gradients, torch's `unscale_` tells all of them what one has found. The
    same holds for all ranks under all-reduce; there torch's own scaler works too, with one optimizer: all ranks skip.

    Nothing here is collective or waits for the device. Arguments and state are those of `torch.amp.GradScaler`.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; then make all of them zero if any is inf or NaN.

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

    For DTensors the local parts are zeroed; flags are those of the whole tensor.
    """
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = sparse_values(tensor) if tensor.is_sparse else local(tensor)
        # As integers: 0 * NaN is NaN, but the bits of any number, times 0 or 1, are the bits of 0 or of that number.
        bits = values.view(_INTEGERS[values.element_size()])
        lists.setdefault((bits.device, bits.dtype), []).append(bits)
    for (device, dtype), bits in lists.items():
        found = sum(flag.to(device, non_blocking=True) for flag in flags)
        torch._foreach_mul_(bits, (found == 0).to(dtype))
