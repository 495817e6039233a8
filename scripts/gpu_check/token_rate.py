"""Check 6, third part: GPT-2's tokens per second, beside a loop as one writes it by hand. Both take turns."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.training.compose import compose_config
from common.training.numerics import autocast
from gpt2.config import Gpt2Config
from gpt2.model import GPT2
from scripts.benchmarks.interleaved_steps import run_interleaved
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.small_runs import steps_only

TURN, TURNS = 10, 7  # steps in a row, how often each loop has its turn; the first is not timed
LEAST_SHARE = 0.9  # of the plain loop's tokens per second
OPTIONS = ["parallel=decentralized", "optimizer=adamw", "optimizer.fused=true", "optimizer.weight_decay=0.1"]
COMPILED = ["training.precision=bf16", "training.compile=true"]


def compare_token_rates(machine: Machine, least_share: float = LEAST_SHARE) -> str:
    """Return tokens per second of this project's training and of a plain loop.

    Raises FailedError if the first has less than the share of the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        steps = TURN * TURNS
        options = [*steps_only("gpt2", machine, folder, steps), *OPTIONS, *(COMPILED if machine.on_gpu else ())]
        config = compose_config("gpt2", options)
        bare = partial(train_plainly, config, torch.device(machine.device))
        timed = run_interleaved("gpt2", options, bare, turn=TURN, settle=machine.settle)
    ours, plain, ratio = timed.compare()
    tokens = config.training.batch_size * config.model.context
    said = f"{tokens / ours:,.0f} tokens/s, plain loop {tokens / plain:,.0f}"
    if 1 / ratio < least_share:
        raise FailedError(f"{said}: a share of {1 / ratio:.3f}, expected at least {least_share:g}")
    return said


def train_plainly(config: Gpt2Config, device: torch.device, boundary: Callable[[], None]) -> None:
    """Train the configured GPT-2 as in nanoGPT, with a call of `boundary` before each step."""
    torch.set_num_threads(config.training.threads or 1)
    model = GPT2(config.model.shape).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.optimizer.betas, fused=True)
    if config.training.compile:
        model.compile()
    batches = windows(config, device)
    batch = next(batches)
    for _ in range(config.training.steps):
        boundary()
        with autocast(config.training.precision, device):
            loss = model(batch[:, :-1], batch[:, 1:])
        batch = next(batches)  # while the GPU runs forward
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def windows(config: Gpt2Config, device: torch.device) -> Iterator[Tensor]:
    """Yield random windows [B, context + 1] of the memory map, copied asynchronously."""
    data = np.memmap(Path(config.data.folder) / "train.bin", dtype=np.uint16, mode="r")
    length, generator = config.model.context + 1, torch.Generator().manual_seed(0)
    for _ in itertools.count():
        starts = torch.randint(len(data) - length, (config.training.batch_size,), generator=generator).tolist()
        batch = torch.from_numpy(np.stack([data[start : start + length].astype(np.int64) for start in starts]))
        yield batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch
