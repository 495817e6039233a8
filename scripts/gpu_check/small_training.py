"""A small training of one worker, for checks that look at how steps run."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel, GradScaler
from common.training.numerics import autocast
from gpt2.model import GPT2, Shape

SHAPE = Shape(layers=2, heads=4, width=128, vocabulary=512, context=64)
BATCH, BUCKET_MB = 4, 0.25  # MiB, so that the model is several buckets
SEED = 3


class SmallTraining:
    """A GPT trained by accumulated AdamW, alone or as one of several workers, as in the README.

    device, precision ("fp32", "bf16" or "fp16"); fused: of the optimizer
    gossip: arguments of DecentralizedDataParallel; None: the bare model
    """

    def __init__(
        self, device: str, precision: str, fused: bool, steps: int, gossip: dict[str, object] | None = None
    ) -> None:
        self._device, self._precision = torch.device(device), precision
        torch.manual_seed(SEED)
        module = GPT2(SHAPE).to(device)
        self.model: nn.Module = module
        if gossip is not None:
            self.model = DecentralizedDataParallel(module, **{"bucket_mb": BUCKET_MB} | gossip)
        # A large eps: else differences of rounding grow where gradients are near 0.
        self._optimizer = AccumAdamW(self.model.parameters(), lr=1e-2, eps=1e-3, accumulation_steps=4, fused=fused)
        if gossip is not None:
            self.model.attach(self._optimizer)
        self._scaler = GradScaler(device, enabled=precision == "fp16")
        generator = torch.Generator().manual_seed(SEED)
        shape = (steps, BATCH, SHAPE.context + 1)
        self._batches = torch.randint(SHAPE.vocabulary, shape, generator=generator).to(device)

    def run(self, steps: Sequence[int]) -> None:
        """Make these steps."""
        for step in steps:
            batch = self._batches[step]
            with autocast(self._precision, self._device):
                loss = self.model(batch[:, :-1], batch[:, 1:])
            self._scaler.scale(loss).backward()
            if self._scaler.is_enabled():
                self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad()

    def parameters(self) -> Tensor:
        """Return all parameters as a vector [P] in float64 on the CPU."""
        return torch.cat([p.detach().double().flatten().cpu() for p in self.model.parameters()])

    def close(self) -> None:
        """End the communication."""
        if isinstance(self.model, DecentralizedDataParallel):
            self.model.close()
