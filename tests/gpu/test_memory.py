"""The memory that tensors hold is the same after 500 steps as after the first ones.

Python's cyclic collector is off meanwhile: memory that comes back only with it is missing until then.
"""

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from common.optim import AccumAdamW
from common.parallel import DataParallel, DecentralizedDataParallel
from common.simulate import simulate
from tests.gpu.device import Device, on_gpu, on_slow_cpu_too

CHECK = 8, "memory stays flat"
SIMULATED, LAYERS = 8, 6
ALLOWED_MODELS = 2.0  # growth, in copies of the model: NCCL's allocations are returned a round later


def width(device: Device) -> int:
    return 1024 if device.on_gpu else 32


def module(device: Device) -> nn.Module:
    size = width(device)
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(LAYERS))).to(device.name)


def alone(device: Device) -> list[DataParallel]:
    return [DecentralizedDataParallel(module(device), "aer")]


def simulated(device: Device) -> list[DataParallel]:
    return list(simulate(module(device), SIMULATED, topology="aer", workers_per_host=SIMULATED // 2))


def training(models: Sequence[DataParallel], device: Device, fused: bool = False) -> Callable[[], None]:
    """Return a step of these workers."""
    optimizers = [model.attach(AccumAdamW(model.parameters(), fused=fused)) for model in models]
    inputs = torch.randn(8, width(device), device=device.name)

    def step() -> None:
        for model in models:
            model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def growth(device: Device, step: Callable[[], None]) -> float:
    """Make the steps; return the growth of memory in copies of the model, of which there may be a few."""
    steps, warmup, every = (500, 40, 20) if device.on_gpu else (40, 8, 4)
    samples = []
    gc.collect()
    gc.disable()
    try:
        for number in range(steps):
            step()
            if number >= warmup and number % every == 0:
                device.settle()
                samples.append(allocated(device))
    finally:
        gc.enable()
    model = sum(p.nbytes for p in module(device).parameters())
    third = len(samples) // 3
    grown = (max(samples[-third:]) - max(samples[:third])) / model
    assert grown <= ALLOWED_MODELS, f"memory in models: {[f'{sample / model:.1f}' for sample in samples]}"
    return grown


def allocated(device: Device) -> int:
    """Return the bytes that tensors hold: on a GPU by its allocator, on a CPU of all that Python knows."""
    if device.on_gpu:
        return torch.cuda.memory_allocated()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors if t.device.type == "cpu")}
    return sum(storages.values())


def in_rank(rank: int, n: int, device: Device, fused: bool) -> float:
    """Return the growth on this rank of n on two hosts."""
    bucket_mb = width(device) / 1024
    model = DecentralizedDataParallel(module(device), "aer", workers_per_host=max(1, n // 2), bucket_mb=bucket_mb)
    grown = growth(device, training([model], device, fused))
    model.close()
    return grown


@pytest.mark.parametrize("workers", [alone, simulated])
@on_gpu
def test_of_one_process(
    device: Device, workers: Callable[[Device], list[DataParallel]], figure: Callable[[str], None]
) -> None:
    figure(f"grows by {growth(device, training(workers(device), device)):.2f} models {workers.__name__}")


@on_slow_cpu_too
def test_of_ranks(device: Device, figure: Callable[[str], None]) -> None:
    for fused in (False, True)[: 1 + device.on_gpu]:
        grown = max(device.run(in_rank, device.ranks, fused, timeout=400))
        figure(f"by {grown:.2f} on {device.ranks} ranks{', fused' * fused}, {device.carriers}")
