"""Check 6, second part: the rate at which fused updates move memory, beside torch's AdamW and a copy on the device."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel
from gpt2.model import GPT2, Shape, parameter_count
from scripts.benchmarks.rounds import median_and_spread, rounds_in_turn
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.step_time import Clock

WINDOW, ROUNDS = 4, 9  # steps of a window of accumulated Adam, which is timed as one
LEAST_SHARE = {"cuda": 0.5, "cpu": 0.01}  # of the copy's rate; a shared CPU only shows that this measures
# Bytes that an update moves for each element in fp32, mean over a window. AdamW reads x, g, m, v and writes x, m, v;
# accumulated AdamW reads x, g, m, v, a and writes x, a, and once in a window m and v.
ADAMW_BYTES, ACCUM_BYTES, COPY_BYTES = 28.0, 28.0 + 8.0 / WINDOW, 8.0
SHAPES = {
    "cuda": Shape(layers=12, heads=12, width=768, vocabulary=50304, context=1024),
    "cpu": Shape(layers=2, heads=2, width=64, vocabulary=8000, context=64),
}


class Contender(NamedTuple):
    """What is timed: a window of updates, and the bytes for each element of one."""

    run: Callable[[], None]
    bytes_per_element: float


def compare_update_rates(machine: Machine) -> str:
    """Return GB/s of a copy, torch's fused AdamW and our fused AccumAdamW on GPT-2's parameters.

    Raises FailedError if ours is below LEAST_SHARE of the copy.
    """
    return judge(rates(machine, contenders(machine)), LEAST_SHARE[machine.device])


def judge(measured: Mapping[str, float], least_share: float) -> str:
    """Return a sentence with the rates. Raises FailedError if AccumAdamW reaches too small a share of a copy's rate."""
    said = ", ".join(f"{name} {value:.0f} GB/s" for name, value in measured.items())
    share = measured["AccumAdamW"] / measured["copy"]
    if not share >= least_share:
        raise FailedError(f"{said}: AccumAdamW has {share:.2f} of the copy's rate, expected at least {least_share:g}")
    return said


def contenders(machine: Machine, fused: bool = True) -> dict[str, Contender]:
    """Return what takes turns; every optimizer has its own parameters and gradients."""
    shape = SHAPES[machine.device]
    model = DecentralizedDataParallel(GPT2(shape).to(machine.device), "complete")  # with flat vectors
    accumulated = model.attach(AccumAdamW(model.parameters(), accumulation_steps=WINDOW, fused=fused))
    module = GPT2(shape).to(machine.device)
    adamw = torch.optim.AdamW(module.parameters(), fused=True)
    for trained in (model, module):
        sum(p.square().sum() for p in trained.parameters()).backward()
    source = torch.cat([p.detach().flatten() for p in module.parameters()])
    target = torch.empty_like(source)
    return {
        "copy": Contender(lambda: _repeat(lambda: target.copy_(source)), COPY_BYTES),
        "AdamW": Contender(lambda: _repeat(adamw.step), ADAMW_BYTES),
        "AccumAdamW": Contender(lambda: _repeat(accumulated.step), ACCUM_BYTES),
    }


def rates(machine: Machine, contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Return GB/s of each, the median over rounds in which they take turns."""
    numel = parameter_count(SHAPES[machine.device])
    for contender in contenders.values():
        contender.run()  # compiles and allocates

    def timed(contender: Contender) -> Callable[[int], float]:
        def run(number: int) -> float:
            clock = Clock(machine)
            machine.settle()
            clock.mark()
            contender.run()
            clock.mark()
            return contender.bytes_per_element * WINDOW * numel / clock.seconds()[0] / 1e9

        return run

    results = rounds_in_turn({name: timed(contender) for name, contender in contenders.items()}, ROUNDS)
    return {name: median_and_spread(values)[0] for name, values in results.items()}


def _repeat(step: Callable[[], object]) -> None:
    for _ in range(WINDOW):
        step()
