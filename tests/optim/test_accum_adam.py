"""The updates against an independent numpy reference and torch's Adam(W), in every version."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.optim import AccumAdam, AccumAdamW
from tests.optim.accum_reference import accum_adam_reference

pytestmark = pytest.mark.usefixtures("eager_kernel")
TORCH_OF = {AccumAdam: torch.optim.Adam, AccumAdamW: torch.optim.AdamW}
CLASSES = pytest.mark.parametrize("cls", TORCH_OF)
VERSIONS = pytest.mark.parametrize("version", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
# Shapes that share chunks, one that is cut in pieces (when chunks are small), a scalar, an empty one.
SHAPES = [(7, 5), (5,), (40, 3), (), (0, 3), (2, 3, 2, 2)]


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters():
    return [nn.Parameter(tensor) for tensor in random_tensors(0)]


@CLASSES
def test_defaults_are_those_of_pytorch(cls):
    ours, theirs = (of(parameters()).defaults for of in (cls, TORCH_OF[cls]))
    assert {name: ours[name] for name in ("lr", "betas", "eps", "weight_decay")}.items() <= theirs.items()


def train(optimizer, params, step):
    for param, grad in zip(params, random_tensors(step), strict=True):
        param.grad = grad
    optimizer.step()


@VERSIONS
@pytest.mark.parametrize("chunk_bytes", [1 << 19, 64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("s", [1, 3])
@CLASSES
def test_equals_numpy_reference(cls, s, weight_decay, chunk_bytes, version, monkeypatch):
    monkeypatch.setattr("common.optim.foreach.CPU_CHUNK_BYTES", chunk_bytes)
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    n_steps = 3 * s + 2  # ends inside a window
    params = parameters()
    optimizer = cls(params, lr=0.01, accumulation_steps=s, **version, **options)
    schedule = LambdaLR(optimizer, lambda t: 1 / (1 + t))
    grads = [random_tensors(t) for t in range(n_steps)]
    expected = [
        accum_adam_reference(
            param.detach().numpy(),
            [step_grads[i].numpy() for step_grads in grads],
            lr=lambda t: 0.01 / (1 + t),
            decoupled=cls is AccumAdamW,
            s=s,
            **options,
        )
        for i, param in enumerate(params)
    ]
    for t in range(n_steps):
        train(optimizer, params, t)
        schedule.step()
        for param, history in zip(params, expected, strict=True):
            np.testing.assert_allclose(param.detach().numpy(), history[t], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("s", [1, 4])
def test_stored_moments(s):
    """After one window of a constant gradient g: m = b1 (1-b1) g, v = b2 (1-b2) g^2, a = 0."""
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AccumAdamW([param], betas=(0.9, 0.98), accumulation_steps=s)
    for k in range(1, s + 1):
        param.grad = torch.full_like(param, 2.0)
        optimizer.step()
        state = optimizer.state[param]
        assert state["step"] == k
        if k < s:
            torch.testing.assert_close(state["accumulator"], torch.full_like(param, 2.0 * k / s))
            assert not state["exp_avg"].any()
            assert not state["exp_avg_sq"].any()
        assert ("accumulator" in state) == (s > 1)  # a window of one step keeps nothing
    torch.testing.assert_close(state["exp_avg"], torch.full_like(param, 0.9 * 0.1 * 2))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full_like(param, 0.98 * 0.02 * 4))
    assert s == 1 or not state["accumulator"].any()


@VERSIONS
def test_the_window_may_change_between_steps(version):
    """From 1 on it begins an accumulator of zeros; to 1 it drops what an unfinished window has accumulated."""
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AccumAdamW([param], betas=(0.9, 0.98), weight_decay=0, accumulation_steps=1, **version)
    accumulated = []
    for s in (1, 2, 3, 1, 4):
        optimizer.param_groups[0]["accumulation_steps"] = s
        param.grad = torch.full_like(param, 2.0)
        optimizer.step()
        accumulated.append(optimizer.state[param].get("accumulator", torch.tensor(-1.0)).mean().item())
    assert accumulated == pytest.approx([-1, 0, 0, -1, 0.5])  # k = 2 and 3 end windows of 2 and 3 steps


@VERSIONS
@CLASSES
def test_decay_never_writes_into_grad(cls, version):
    params = parameters()
    grads = random_tensors(1)
    versions = []
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
        versions.append(grad._version)
    optimizer = cls(params, weight_decay=0.5, accumulation_steps=2, **version)
    for _ in range(3):
        optimizer.step()
    for param, grad, original, version in zip(params, grads, random_tensors(1), versions, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, original)
        assert grad._version == version


@VERSIONS
def test_skipped_parameter_keeps_its_own_count(version):
    """Gradients at steps 0, 2, 3, 6 only: as if the other steps had not been."""
    s, options = 3, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    rare, steady, never = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(3))
    optimizer = AccumAdamW([rare, steady, never], lr=0.01, accumulation_steps=s, **version, **options)
    generator = torch.Generator().manual_seed(0)
    rare_grads, steady_grads = [], []
    for t in range(8):
        steady.grad = torch.randn(4, generator=generator, dtype=torch.float64)
        rare.grad = torch.randn(4, generator=generator, dtype=torch.float64) if t in (0, 2, 3, 6) else None
        steady_grads.append(steady.grad.numpy())
        rare_grads.append(None if rare.grad is None else rare.grad.numpy())
        optimizer.step()
    for param, grads in ((rare, rare_grads), (steady, steady_grads)):
        expected = accum_adam_reference(np.ones(4), grads, lr=0.01, decoupled=True, s=s, **options)[-1]
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-13)
    assert optimizer.state[rare]["step"] == 4
    assert optimizer.state[steady]["step"] == 8
    assert never not in optimizer.state
    assert torch.equal(never, torch.ones(4, dtype=torch.float64))


def test_groups_keep_their_own_options():
    """Two groups train as two optimizers would."""
    together, alone = parameters(), parameters()
    options = [
        {"lr": 0.01, "weight_decay": 0.1, "accumulation_steps": 2},
        {"lr": 0.03, "weight_decay": 0.0, "accumulation_steps": 3, "betas": (0.5, 0.6), "eps": 1e-4},
    ]
    one = AccumAdamW(
        [{"params": together[:3], **options[0]}, {"params": together[3:], **options[1]}], accumulation_steps=7
    )
    two = [AccumAdamW(alone[:3], **options[0]), AccumAdamW(alone[3:], **options[1])]
    for t in range(7):
        train(one, together, t)
        for param, grad in zip(alone, random_tensors(t), strict=True):
            param.grad = grad
        for optimizer in two:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    param = nn.Parameter(torch.ones(2))
    optimizer = AccumAdamW([param])

    def closure():
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (param < 1).all()


@VERSIONS
@CLASSES
def test_windows_of_one_step_are_torchs_also_with_betas_that_move(cls, version):
    params = [nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2)]
    optimizers = [TORCH_OF[cls](params[:1], lr=0.1), cls(params[1:], lr=0.1, accumulation_steps=1, **version)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.01
    for step in range(12):
        for param, optimizer in zip(params, optimizers, strict=True):
            optimizer.param_groups[0]["betas"] = (0.85 + 0.01 * step, 0.99 - 0.01 * (step % 3))
            param.grad = None if step == 5 else torch.linspace(-1, 1, 5, dtype=torch.float64) * (step % 4 - 1.3)
            optimizer.step()
    torch.testing.assert_close(params[1], params[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 8)])
def test_a_change_of_the_window_does_not_change_the_size_of_a_step(before, after):
    """With a gradient that stays the same every step is lr, whatever the window; from an old state dict too."""
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AccumAdamW([param], lr=0.1, weight_decay=0.0, eps=0.0, accumulation_steps=before)
    state = None
    for step in range(60):
        if step == 40:
            state = optimizer.state_dict()
            state["state"][0].pop("windows", None)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["accumulation_steps"] = after
        old, param.grad = param.detach().clone(), torch.ones(3, dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(old - param, torch.full_like(param, 0.1), rtol=1e-9, atol=0)
