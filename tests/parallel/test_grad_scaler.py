"""The scaler for gossip in one process: torch's, but that an overflow makes gradients zero."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from common.parallel import GradScaler
from common.parallel.grad_scaler import zero_if_
from tests.host_sync import NoHostSync

OPTIMIZERS = {
    "sgd": lambda p, **options: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **options),
    "adam": lambda p, **options: torch.optim.Adam(p, lr=0.1, **options),
}
FUSED = [False, True]


def trained(
    scaler: torch.amp.GradScaler, name: str, bad: dict[int, float], zero: bool = False, **options: bool
) -> tuple:
    """Return the parameters after 8 steps and the scales; bad: {step: value of a gradient then}, or zero gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    scales = []
    for step in range(8):
        scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
        if step in bad and zero:
            optimizer.zero_grad(set_to_none=False)
        elif step in bad:
            model.weight.grad[0, 0] = bad[step]
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), scales


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_is_a_zero_gradient(name: str, fused: bool) -> None:
    """Bit for bit, in every step; scales are those of torch. Without an overflow all is as torch has it."""
    bad = {0: math.nan, 3: math.inf, 4: -math.inf}
    options = {"init_scale": 256.0, "growth_interval": 2}
    ours, scales = trained(GradScaler("cpu", **options), name, bad, fused=fused)
    expected, _ = trained(GradScaler("cpu", enabled=False), name, bad, zero=True, fused=fused)
    _, expected_scales = trained(torch.amp.GradScaler("cpu", **options), name, bad)
    assert torch.equal(ours, expected)
    assert scales == expected_scales
    ours, scales = trained(GradScaler("cpu", **options), name, {}, fused=fused)
    expected, expected_scales = trained(torch.amp.GradScaler("cpu", **options), name, {}, fused=fused)
    assert torch.equal(ours, expected)
    assert scales == expected_scales


def test_each_optimizer_is_on_its_own_and_the_scale_falls_once() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in parameters]
    scaler = GradScaler("cpu", init_scale=4.0)
    (scaler.scale(torch.ones(())) * sum(parameter.sum() for parameter in parameters)).backward()
    parameters[0].grad[0] = torch.inf
    parameters[1].grad[1] = torch.nan
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [parameter.tolist() for parameter in parameters] == [[1, 1], [1, 1], [0, 0]]
    assert scaler.get_scale() == 2.0


def test_zero_if_leaves_every_other_bit_alone() -> None:
    """Dtypes, layouts, views of one vector with something between them, and a flag on any of several devices."""
    vector = torch.tensor([1.0, math.nan, -0.0, 1e-42, math.inf, 7.0, -math.inf, 8.0])
    views = [vector[1:3], vector[3:5], vector[6:7].view(())]
    others = [vector[:6].to(dtype).view(2, 3).t() for dtype in (torch.bfloat16, torch.float16, torch.float64)]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([math.nan, 1.0, 2.0]), (3,), check_invariants=True
    )
    tensors = [*views, *others, torch.zeros(0, 3), sparse]
    before = [t.clone() for t in tensors]
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    zero_if_([zero, zero], tensors)
    for tensor, old in zip(tensors[:-1], before, strict=False):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8))
    assert sparse._values().isnan().tolist() == [True, False, False]
    zero_if_([zero, one], tensors)
    assert not any(tensor.to_dense().any() for tensor in tensors)
    assert vector.tolist() == [1, 0, 0, 0, 0, 7, 0, 8]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nobody_waits(device: str) -> None:
    """On tensors without values too, of a GPU that need not be there: with such nothing can depend on values."""
    with FakeTensorMode() if device == "cuda" else NoHostSync():
        parameters = [nn.Parameter(torch.ones(size, device=device)) for size in (3, 5)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        scaler = GradScaler("cpu")  # or it would ask for a real GPU
        for clip in (False, True):
            scaler.scale(torch.ones((), device=device))
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, math.inf)
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()


def test_torchs_scaler_waits() -> None:
    """So the test above can see it."""
    parameter = nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    with NoHostSync(), pytest.raises(AssertionError, match="waits for the device"):
        scaler.step(torch.optim.SGD([parameter], lr=0.1))


def test_no_gradient_and_a_second_step_are_errors() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"called after step\(\)"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()
