"""Check 8: the memory that tensors hold is the same after 500 steps as after the first ones.

Python's cyclic collector is off meanwhile: memory that comes back only with it is missing until then.
"""

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from common.optim import AccumAdamW
from common.parallel import DataParallel, DecentralizedDataParallel
from common.simulate import simulate
from scripts.gpu_check.gossip import probe
from scripts.gpu_check.outcome import FailedError, Machine, SkippedError
from scripts.gpu_check.processes import run_ranks

SIMULATED = 8


class Size(NamedTuple):
    """Steps, those before the first sample and between samples; width and number of the model's linear layers."""

    steps: int
    warmup: int
    every: int
    width: int
    layers: int


SIZES = {"cuda": Size(500, 40, 20, 1024, 6), "cpu": Size(60, 20, 10, 64, 3)}
ALLOWED_MODELS = 2.0  # growth, in copies of the model: NCCL's allocations are returned a round later


def check(machine: Machine) -> str:
    """Sample the memory of AER on two emulated hosts, of one worker alone, and of simulated workers."""
    figures = [f"alone {grow(machine, alone(machine)):.2f}", f"simulated {grow(machine, simulated(machine)):.2f}"]
    n = 1 << (machine.ranks.bit_length() - 1)  # AER is defined for powers of two
    try:
        probe(machine)
        for fused in (False, True):
            values = run_ranks(grow_in_rank, n, machine, fused, timeout_s=400)
            figures.append(f"{n} ranks{', fused' * fused} {max(values):.2f}")
    except SkippedError as reason:
        figures.append(f"AER not run: {reason}")
    return f"growth over {SIZES[machine.device].steps} steps, in copies of the model: {', '.join(figures)}"


def grow_in_rank(rank: int, n: int, machine: Machine, fused: bool) -> float:
    """Return the growth on this rank. Raises FailedError if it is too much."""
    model = DecentralizedDataParallel(
        module(machine), "aer", workers_per_host=max(1, n // 2), bucket_mb=SIZES[machine.device].width / 1024
    )
    return grow(machine, _training([model], machine, fused))


def alone(machine: Machine) -> Callable[[], None]:
    """Return the step of a single worker."""
    return _training([DecentralizedDataParallel(module(machine), "aer")], machine, fused=False)


def simulated(machine: Machine) -> Callable[[], None]:
    """Return the step of simulated workers on two hosts."""
    replicas = simulate(module(machine), SIMULATED, topology="aer", workers_per_host=SIMULATED // 2)
    return _training(replicas, machine, fused=False)


def grow(machine: Machine, step: Callable[[], None]) -> float:
    """Make the steps and return the growth of memory in copies of the model.

    Raises FailedError if it is more than ALLOWED_MODELS.
    """
    size = SIZES[machine.device]
    samples = []
    gc.collect()
    gc.disable()
    try:
        for number in range(size.steps):
            step()
            if number >= size.warmup and number % size.every == 0:
                machine.settle()
                samples.append(allocated(machine))
    finally:
        gc.enable()
    model = sum(p.nbytes for p in module(machine).parameters())
    third = max(1, len(samples) // 3)
    growth = (max(samples[-third:]) - max(samples[:third])) / model
    if growth > ALLOWED_MODELS:
        raise FailedError(
            f"memory grew by {growth:.1f} copies of the model over {size.steps} steps, expected at most "
            f"{ALLOWED_MODELS:g}: {[f'{sample / model:.1f}' for sample in samples]} copies"
        )
    return growth


def allocated(machine: Machine) -> int:
    """Return the bytes that tensors hold: on a GPU by its allocator, on a CPU of all that Python knows."""
    if machine.on_gpu:
        return torch.cuda.memory_allocated()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors if t.device.type == "cpu")}
    return sum(storages.values())


def module(machine: Machine) -> nn.Module:
    """Return a stack of linear layers."""
    size = SIZES[machine.device]
    return nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(size.layers))).to(machine.device)


def _training(models: Sequence[DataParallel], machine: Machine, fused: bool) -> Callable[[], None]:
    optimizers = [model.attach(AccumAdamW(model.parameters(), fused=fused)) for model in models]
    inputs = torch.randn(8, SIZES[machine.device].width, device=machine.device)

    def step() -> None:
        for model in models:
            model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step
