"""In one process the scaler is torch's, but for optimizers that would have handled an inf themselves."""

import pytest
import torch
from torch import nn

from common.parallel import GradScaler

FUSED = [False, True]


def trained(scaler: torch.amp.GradScaler, fused: bool, unscale: bool = False) -> tuple[list, list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scales = []
    for step in range(8):
        x = torch.randn(3, 4)
        scaler.scale(model(x).square().mean()).backward()
        if step in (0, 4):
            model.weight.grad[0, 0] = torch.nan
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [parameter.detach() for parameter in model.parameters()], scales


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", FUSED)
def test_equals_torch(fused: bool, unscale: bool) -> None:
    options = {"init_scale": 256.0, "growth_interval": 2}
    ours, scales = trained(GradScaler("cpu", **options), fused, unscale)
    theirs, expected_scales = trained(torch.amp.GradScaler("cpu", **options), fused=False, unscale=unscale)
    assert scales == expected_scales
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fused", FUSED)
def test_hooks_do_not_fire_on_a_skipped_step(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    scaler = GradScaler("cpu")
    for factor, expected in ((torch.inf, []), (1.0, ["before", "after"])):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert fired == expected


def test_disabled_scaler_just_steps() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu", enabled=False)
    parameter.grad = torch.ones(2)
    scaler.step(optimizer)
    assert scaler.all_finite([optimizer]) is True
    assert parameter.tolist() == [0.5, 0.5]


def test_no_gradient_is_an_error() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"no parameter of the optimizer has a gradient; call backward\(\) first"):
        scaler.step(optimizer)
