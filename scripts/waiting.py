"""A model that waits where it would compute: its forward and backward leave the CPU free, as an accelerator does."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class WaitingModel(nn.Module):
    """Layers of equal size whose gradients become ready one after another during the backward pass.

    payload_mb:     parameters in MB (1e6 bytes, fp32)
    compute_ms:     forward and backward together, of which backward_share is backward
    """

    def __init__(
        self,
        payload_mb: float,
        compute_ms: float,
        *,
        layers: int = 8,
        backward_share: float = 2 / 3,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        numel = round(payload_mb * 1e6 / 4 / layers)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel, device=device)) for _ in range(layers))
        self.forward_s = (1 - backward_share) * compute_ms / 1000 / layers
        self.backward_s = backward_share * compute_ms / 1000 / layers

    def forward(self) -> Tensor:
        """A loss, a scalar that depends on every weight."""
        loss = torch.zeros((), device=self.weights[0].device, requires_grad=True)
        for weight in self.weights:
            loss = _Wait.apply(loss, weight, self.forward_s, self.backward_s)
        return loss


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return gradient, torch.full_like(weight, 1e-3), None, None
