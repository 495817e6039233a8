"""Check 2: all versions of AccumAdam(W) give the same parameters, and the compiler is called a bounded number of times.

The reference is the recurrence in float64 on the CPU, one tensor and one equation at a time.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.optim import AccumAdam, AccumAdamW
from common.optim.compiled import fused_kernel
from common.optim.functional import Hyper, update_one
from common.parallel import DecentralizedDataParallel
from scripts.gpu_check.outcome import FailedError, Machine

STEPS = 7
LARGE = {"cuda": (1000, 1003), "cpu": (30, 33)}
# A large eps: else, among a million elements, rounding counts where a gradient with its decay is near 0.
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
# The mean and the largest difference of the parameters' elements; bfloat16 rounds every step.
TOLERANCES = {torch.float32: (1e-6, 2e-5), torch.bfloat16: (0.015, 0.25)}
# name: arguments of the optimizer, and whether the engine puts parameters, gradients and state into flat vectors
VARIANTS = {
    "plain": ({"foreach": False}, False),
    "foreach": ({"foreach": True}, False),
    "fused": ({"fused": True}, False),
    "fused in flat vectors": ({"fused": True}, True),
}


class Odd(nn.Module):
    """Parameters of every layout; forward(coefficients) has the coefficients as gradients.

    A scalar, odd sizes, a transposed matrix, a channels_last weight, and a matrix under two names.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.scalar = nn.Parameter(parameter())
        self.odd = nn.Parameter(parameter(17))
        self.matrix = nn.Parameter(parameter(33, 7))
        self.transposed = nn.Parameter(parameter(5, 4).t())
        self.convolution = nn.Parameter(parameter(6, 3, 3, 3).to(memory_format=torch.channels_last))
        self.large = nn.Parameter(parameter(*LARGE[torch.device(device).type]))
        self.tied = self.matrix

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        """Return the sum of all parameters times coefficients, tied ones twice."""
        return sum((p * c).sum() for p, c in zip(self.named(), coefficients, strict=True))

    def named(self) -> list[nn.Parameter]:
        """Return the parameters under all their names."""
        return [parameter for _, parameter in self.named_parameters(remove_duplicate=False)]


class Update(NamedTuple):
    """A kind of update."""

    optimizer: type[AccumAdam]
    dtype: torch.dtype
    window: int


def check(machine: Machine) -> str:
    """Compare all versions for both optimizers, both dtypes and windows of 1 and 3 steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fused_kernel.cache_clear()
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for update in itertools.starmap(Update, itertools.product((AccumAdam, AccumAdamW), TOLERANCES, (1, 3))):
        worst[update.dtype] = max(worst[update.dtype], compare(machine, update, VARIANTS))
    graphs, kernels = torch._dynamo.utils.counters["stats"]["unique_graphs"], fused_kernel.cache_info().currsize
    check_compilations(graphs, kernels, len(TOLERANCES))
    shown = ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.1e}" for dtype, value in worst.items())
    return f"differences from float64: {shown}; {graphs} graphs compiled for {kernels} kernels"


def compare(machine: Machine, update: Update, variants: Sequence[str]) -> float:
    """Return the largest difference from the reference after STEPS steps.

    Raises FailedError naming the version that differs by more than the tolerances, and its worst parameter.
    """
    modules = {name: Odd(machine.device, update.dtype) for name in variants}
    steppers = {name: _stepper(module, update, name) for name, module in modules.items()}
    reference = [[p.detach().double().cpu()] for p in next(iter(modules.values())).parameters()]
    for state in reference:
        state += [torch.zeros_like(state[0]) for _ in range(3)]  # m, v, a
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        first = next(iter(modules.values()))
        coefficients = [torch.randn(p.shape, generator=generator).to(p) for p in first.named()]
        gradients = _gradients(first, coefficients)
        for state, gradient in zip(reference, gradients, strict=True):
            _update_reference(state, gradient, update, step + 1)
        for model, optimizer in steppers.values():
            model(coefficients).backward()
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for name, module in modules.items():
        differences = {
            key: (p.detach().double().cpu() - want).abs().nan_to_num(torch.inf)
            for (key, p), (want, *_) in zip(module.named_parameters(), reference, strict=True)
        }
        flat = torch.cat([difference.flatten() for difference in differences.values()])
        mean, largest = flat.mean().item(), flat.max().item()
        if mean > TOLERANCES[update.dtype][0] or largest > TOLERANCES[update.dtype][1]:
            key = max(differences, key=lambda key: differences[key].max().item())
            raise FailedError(
                f"{update.optimizer.__name__}, {name}, {update.dtype}, windows of {update.window}: parameters differ "
                f"from float64 by {mean:.1e} on average and '{key}' by {largest:.1e} at most, expected "
                f"{TOLERANCES[update.dtype]}"
            )
        worst = max(worst, largest)
    return worst


def check_compilations(graphs: int, kernels: int, dtypes: int) -> None:
    """Raise FailedError if more than one graph was compiled for each kernel and dtype."""
    if graphs > kernels * dtypes:
        raise FailedError(f"{graphs} graphs compiled, expected at most {kernels} kernels x {dtypes} dtypes")


def _stepper(module: Odd, update: Update, variant: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    options, flat = VARIANTS[variant]
    model = DecentralizedDataParallel(module, "complete") if flat else module
    optimizer = update.optimizer(model.parameters(), **OPTIONS, accumulation_steps=update.window, **options)
    return model, model.attach(optimizer) if flat else optimizer


def _gradients(module: Odd, coefficients: Sequence[Tensor]) -> list[Tensor]:
    """Return what backward gives the parameters, each once, in float64 on the CPU."""
    gradients = torch.autograd.grad(module(coefficients), list(module.parameters()))
    return [gradient.double().cpu() for gradient in gradients]


def _update_reference(state: list[Tensor], gradient: Tensor, update: Update, k: int) -> None:
    b1, b2 = OPTIONS["betas"]
    decay, decoupled = OPTIONS["weight_decay"], update.optimizer.decoupled_weight_decay
    hyper = Hyper(OPTIONS["lr"], b1, b2, OPTIONS["eps"], decay, decoupled, update.window)
    x, m, v, a = state
    with torch.no_grad():
        update_one(x, gradient, m, v, a if update.window > 1 else None, k=k, hyper=hyper)
