"""Trainings that the checks look at: a small GPT by hand, and short runs of the tasks as from the command line."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel, GradScaler
from common.training.device import autocast
from gpt2.config import Shape
from gpt2.model import GPT2
from tests.gpt2.corpora import write_tokens
from tests.gpu.device import Device

SHAPE = Shape(layers=2, heads=4, width=128, vocabulary=512, context=64)
GPT2_SMALL = Shape(layers=12, heads=12, width=768, vocabulary=50304, context=1024)
BATCH, BUCKET_MB, SEED = 4, 0.25, 3  # MiB, so that the model is several buckets


class SmallTraining:
    """A GPT trained by accumulated AdamW, alone or as one of several workers (`gossip`: arguments of the wrapper)."""

    def __init__(
        self, device: Device, precision: str, fused: bool, steps: int, gossip: dict[str, object] | None = None
    ) -> None:
        self._device, self._precision = torch.device(device.name), precision
        torch.manual_seed(SEED)
        self.model: nn.Module = GPT2(SHAPE).to(device.name)
        if gossip is not None:
            self.model = DecentralizedDataParallel(self.model, **{"bucket_mb": BUCKET_MB} | gossip)
        # A large eps: else differences of rounding grow where gradients are near 0.
        self._optimizer = AccumAdamW(self.model.parameters(), lr=1e-2, eps=1e-3, accumulation_steps=4, fused=fused)
        if gossip is not None:
            self.model.attach(self._optimizer)
        self._scaler = GradScaler(device.name, enabled=precision == "fp16")
        shape = (steps, BATCH, SHAPE.context + 1)
        self._batches = torch.randint(SHAPE.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
        self._batches = self._batches.to(device.name)

    def run(self, steps: Iterable[int]) -> "SmallTraining":
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
        return self

    def end(self) -> Tensor:
        """End the communication and return all parameters as a vector [P] in float64 on the CPU."""
        if isinstance(self.model, DecentralizedDataParallel):
            self.model.close()
        return torch.cat([p.detach().double().flatten().cpu() for p in self.model.parameters()])


def short_run(task: str, device: Device, folder: Path, steps: int) -> list[str]:
    """Return overrides of a run of one worker that does nothing but steps, on random data, into FOLDER/run."""
    arguments = ["evaluation.every=1000000", "training.checkpoint_every=null", "logging.progress=false"]
    arguments += [f"training.steps={steps}", f"training.device={device.name}", "training.threads=1"]
    arguments += [f"run_dir={folder}/run", "workers.count=1", "schedule.warmup=0"]
    if task == "cnn":
        return [*arguments, "optimizer=accumadam", "schedule=constant"]
    size = GPT2_SMALL.vocabulary
    tokens = np.random.default_rng(0).integers(size, size=1_000_000)
    write_tokens(folder / "tokens", tokens, tokens, vocabulary_size=size, end_of_text=size - 1, largest_token=size - 1)
    arguments += ["data=tokens", f"data.folder={folder}/tokens", "data.evaluation_batches=1", "evaluation.batch_size=1"]
    arguments += ["training.clip=1.0", f"model.vocabulary={size}"]
    if device.on_gpu:
        return [*arguments, "model=gpt2_small", "training.batch_size=16"]
    small = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32"]
    return [*arguments, *small, "training.batch_size=4"]


class Clock:
    """Marks in time: CUDA events on a GPU, which count when the GPU gets there, else the processor's time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Add a mark behind everything that was started so far."""
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._device.on_gpu else time.perf_counter())
        if self._device.on_gpu:
            self._marks[-1].record()

    def seconds(self) -> list[float]:
        """Return the times from each mark to the next one."""
        self._device.settle()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) / 1000 if self._device.on_gpu else b - a for a, b in pairs]
