"""Reported times are true, and updates and steps are about as fast as the GPU and a plain loop allow."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.launch.compose import compose_config
from common.launch.processes import launch
from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel
from common.training.device import autocast
from common.training.recorder import Recorder
from gpt2.config import Gpt2Config, Shape
from gpt2.model import GPT2, parameter_count
from tests.gpu.device import Device, on_gpu, on_slow_cpu_too
from tests.gpu.training import GPT2_SMALL, Clock, short_run
from tests.training.runs import rows

CHECK = 6, "times and speed"
EVERY, WINDOWS, UNTIMED_WINDOWS = 10, 7, 2  # steps of a row of metrics, rows
WINDOW, ROUNDS = 4, 9  # steps of a window of accumulated Adam, which is timed as one
# Bytes that an update moves for each element in fp32, mean over a window. AdamW reads x, g, m, v and writes x, m, v;
# accumulated AdamW reads x, g, m, v, a and writes x, a, and once in a window m and v.
BYTES = {"copy": 8.0, "AdamW": 28.0, "AccumAdamW": 28.0 + 8.0 / WINDOW}
OPTIONS = ["parallel=decentralized", "optimizer=adamw", "optimizer.fused=true", "optimizer.weight_decay=0.1"]
COMPILED = ["training.precision=bf16", "training.compile=true"]
LEAST_OF_COPY, LEAST_OF_PLAIN = 0.5, 0.9  # shares of the rate of a copy, of the tokens a second of a plain loop


@contextlib.contextmanager
def marking_steps(clock: Clock) -> Iterator[None]:
    """Mark the end of every step of training."""
    step = Recorder.step

    def marking(recorder: Recorder, *args: Any, **options: Any) -> None:
        clock.mark()
        step(recorder, *args, **options)

    with mock.patch.object(Recorder, "step", marking):
        yield


def step_times(device: Device, folder: Path) -> tuple[float, float]:
    """Return `time_step_ms` of a GPT-2 run, in terms of the measured time, and this in ms: medians over the rows."""
    clock = Clock(device)
    arguments = [*short_run("gpt2", device, folder, EVERY * WINDOWS), f"logging.every={EVERY}"]
    with marking_steps(clock):
        assert launch("gpt2", arguments + COMPILED[:1] * device.on_gpu) == 0
    reported = [row["time_step_ms"] for row in rows(folder / "run", times=True) if row["split"] == "train"]
    steps = clock.seconds()  # the first is that of the second step
    windows = [steps[EVERY * window - 1 : EVERY * (window + 1) - 1] for window in range(UNTIMED_WINDOWS, WINDOWS)]
    measured = [1000 * statistics.fmean(window) for window in windows]
    return statistics.median(map(lambda r, m: r / m, reported[UNTIMED_WINDOWS:], measured)), statistics.median(measured)


@on_slow_cpu_too
def test_reported_step_times_are_true(device: Device, figure: Callable[[str], None], tmp_path: Path) -> None:
    ratio, ms = step_times(device, tmp_path)
    figure(f"time_step_ms {ratio:.3f} of {ms:.1f} ms measured")
    assert ratio == pytest.approx(1, abs=0.05 if device.on_gpu else 0.2)


def windows_of_updates(shape: Shape, device: Device) -> dict[str, Callable[[], object]]:
    """Return an update of each, with its own parameters and gradients, and a copy of as many elements."""
    model = DecentralizedDataParallel(GPT2(shape).to(device.name), "complete")  # with flat vectors
    accumulated = model.attach(AccumAdamW(model.parameters(), accumulation_steps=WINDOW, fused=True))
    module = GPT2(shape).to(device.name)
    adamw = torch.optim.AdamW(module.parameters(), fused=True)
    for trained in (model, module):
        sum(p.square().sum() for p in trained.parameters()).backward()
    source = torch.cat([p.detach().flatten() for p in module.parameters()])
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source), "AdamW": adamw.step, "AccumAdamW": accumulated.step}


def rates(shape: Shape, device: Device) -> Mapping[str, float]:
    """Return GB/s of each, the median over rounds in which they take turns."""
    updates = windows_of_updates(shape, device)
    found: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(1 + ROUNDS):  # the first compiles and allocates
        for name, update in updates.items():
            clock = Clock(device)
            device.settle()
            clock.mark()
            for _ in range(WINDOW):
                update()
            clock.mark()
            found[name].append(BYTES[name] * WINDOW * parameter_count(shape) / clock.seconds()[0] / 1e9)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


@on_gpu
def test_updates_are_bound_by_memory(device: Device, figure: Callable[[str], None]) -> None:
    found = rates(GPT2_SMALL, device)
    figure(", ".join(f"{name} {value:.0f} GB/s" for name, value in found.items()))
    assert found["AccumAdamW"] >= LEAST_OF_COPY * found["copy"]


def train_plainly(config: Gpt2Config, device: Device, clock: Clock) -> None:
    """Train the configured GPT-2 as in nanoGPT, with a mark at the end of each step."""
    torch.set_num_threads(1)
    model = GPT2(config.model).to(device.name)
    kinds = {0.1: [p for p in model.parameters() if p.dim() >= 2], 0.0: [p for p in model.parameters() if p.dim() < 2]}
    groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in kinds.items()]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.optimizer.betas, fused=True)
    if config.training.compile:
        model.compile()
    batches = batches_of(config, device)
    batch = next(batches)
    for _ in range(config.training.steps):
        with autocast(config.training.precision, torch.device(device.name)):
            loss = model(batch[:, :-1], batch[:, 1:])
        batch = next(batches)  # while the GPU runs forward
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.mark()


def batches_of(config: Gpt2Config, device: Device) -> Iterator[Tensor]:
    """Yield random windows [B, context + 1] of the memory map, copied asynchronously."""
    data = np.memmap(Path(config.data.folder) / "train.bin", dtype=np.uint16, mode="r")
    length, generator = config.model.context + 1, torch.Generator().manual_seed(0)
    for _ in itertools.count():
        starts = torch.randint(len(data) - length, (config.training.batch_size,), generator=generator).tolist()
        batch = torch.from_numpy(np.stack([data[start : start + length].astype(np.int64) for start in starts]))
        yield batch.pin_memory().to(device.name, non_blocking=True) if device.on_gpu else batch


@on_slow_cpu_too
def test_training_is_as_fast_as_a_plain_loop(device: Device, figure: Callable[[str], None], tmp_path: Path) -> None:
    steps = EVERY * (WINDOWS if device.on_gpu else 3)
    options = [*short_run("gpt2", device, tmp_path, steps), *OPTIONS, *COMPILED * device.on_gpu]
    config = compose_config("gpt2", options)
    clocks = Clock(device), Clock(device)
    train_plainly(config, device, clocks[0])
    with marking_steps(clocks[1]):
        assert launch("gpt2", options) == 0
    plain, ours = (statistics.median(clock.seconds()[EVERY:]) for clock in clocks)
    tokens = config.training.batch_size * config.model.context
    figure(f"{tokens / ours:,.0f} tokens/s, plain loop {tokens / plain:,.0f}")
    assert plain / ours >= (LEAST_OF_PLAIN if device.on_gpu else 0.02)
