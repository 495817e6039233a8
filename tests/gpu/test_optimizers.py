"""All versions of AccumAdam(W) give the same parameters, and the compiler is called a bounded number of times.

The reference is the recurrence in float64 on the CPU, one tensor and one equation at a time.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.optim import AccumAdam, AccumAdamW
from common.optim.compiled import fused_kernel
from common.optim.functional import Hyper, update_one
from common.parallel import DecentralizedDataParallel
from tests.gpu.device import Device, on_slow_cpu_too

CHECK = 2, "versions of AccumAdam(W) agree"
STEPS = 7
# A large eps: else, among a million elements, rounding counts where a gradient with its decay is near 0.
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
# The mean and the largest difference of the parameters' elements; bfloat16 rounds every step.
TOLERANCES = {torch.float32: (1e-6, 2e-5), torch.bfloat16: (0.015, 0.25)}
# Arguments of the optimizer, and whether the engine puts parameters, gradients and state into flat vectors.
VERSIONS = {
    "plain": ({"foreach": False}, False),
    "foreach": ({"foreach": True}, False),
    "fused": ({"fused": True}, False),
    "fused in flat vectors": ({"fused": True}, True),
}
UPDATES = tuple(itertools.product((AccumAdam, AccumAdamW), TOLERANCES, (1, 3)))  # and steps of a window


class Odd(nn.Module):
    """Parameters of every layout, one of them under two names; forward(coefficients) has these as gradients."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device.name, dtype)

        self.scalar, self.odd = nn.Parameter(parameter()), nn.Parameter(parameter(17))
        self.matrix, self.transposed = nn.Parameter(parameter(33, 7)), nn.Parameter(parameter(5, 4).t())
        self.convolution = nn.Parameter(parameter(6, 3, 3, 3).to(memory_format=torch.channels_last))
        self.large = nn.Parameter(parameter(*((1000, 1003) if device.on_gpu else (30, 33))))
        self.tied = self.matrix

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return sum((p * c).sum() for p, c in zip(self.named(), coefficients, strict=True))

    def named(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters(remove_duplicate=False)]


def difference(device: Device, version: str, cls: type[AccumAdam], dtype: torch.dtype, window: int) -> float:
    """Return the largest difference from the reference after STEPS steps; check it and the mean one."""
    options, flat = VERSIONS[version]
    module = Odd(device, dtype)
    states = [[p.detach().double().cpu()] for p in module.parameters()]
    for state in states:
        state += [torch.zeros_like(state[0]) for _ in range(3)]  # m, v, a
    model = DecentralizedDataParallel(module, "complete") if flat else module
    optimizer = cls(model.parameters(), **OPTIONS, accumulation_steps=window, **options)
    if flat:
        model.attach(optimizer)
    lr, betas, eps, decay = OPTIONS.values()
    hyper = Hyper(lr, *betas, eps, decay, cls.decoupled_weight_decay, window)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        coefficients = [torch.randn(p.shape, generator=generator).to(p) for p in module.named()]
        gradients = torch.autograd.grad(module(coefficients), list(module.parameters()))
        for (x, m, v, a), gradient in zip(states, gradients, strict=True):
            with torch.no_grad():
                update_one(x, gradient.double().cpu(), m, v, a if window > 1 else None, k=step + 1, hyper=hyper)
        model(coefficients).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(module.parameters(), states, strict=True)
    found = torch.cat([(p.detach().double().cpu() - x).abs().flatten() for p, (x, *_) in pairs])
    found = found.nan_to_num(torch.inf)
    mean, largest = found.mean().item(), found.max().item()
    assert mean <= TOLERANCES[dtype][0], f"{version}, {cls.__name__}, {dtype}, windows of {window}: {mean} on average"
    assert largest <= TOLERANCES[dtype][1], f"{version}, {cls.__name__}, {dtype}, windows of {window}: {largest}"
    return largest


@on_slow_cpu_too
def test_all_versions_agree_and_few_are_compiled(device: Device, figure: Callable[[str], None]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fused_kernel.cache_clear()
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for update, version in itertools.product(UPDATES, VERSIONS):
        worst[update[1]] = max(worst[update[1]], difference(device, version, *update))
    graphs, kernels = torch._dynamo.utils.counters["stats"]["unique_graphs"], fused_kernel.cache_info().currsize
    figure(f"differences from float64: {', '.join(f'{dtype} {value:.1e}' for dtype, value in worst.items())}")
    figure(f"{graphs} graphs compiled for {kernels} kernels")
    assert 0 < graphs <= kernels * len(TOLERANCES)
