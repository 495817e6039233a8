"""The updates: against torch's Adam(W) for s = 1, and against an independent numpy reference for any s."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.optim import AccumAdam, AccumAdamW, Hyper, accum_adam_update
from tests.optim.accum_reference import accum_adam_reference

TORCH_OF = {AccumAdam: torch.optim.Adam, AccumAdamW: torch.optim.AdamW}
CLASSES = list(TORCH_OF)
# Shapes that share chunks, one that is cut in pieces (when chunks are small), a scalar, an empty one.
SHAPES = [(7, 5), (5,), (40, 3), (), (0, 3), (2, 3, 2, 2)]


@pytest.fixture(params=[None, 64], ids=["one chunk", "64-byte chunks"])
def chunk_bytes(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr("common.optim.foreach.CPU_CHUNK_BYTES", request.param)


def random_tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float32):
    return [nn.Parameter(tensor) for tensor in random_tensors(0, dtype)]


def train(optimizer, params, n_steps, first=1):
    for t in range(first, first + n_steps):
        for param, grad in zip(params, random_tensors(t, params[0].dtype), strict=True):
            param.grad = grad
        optimizer.step()


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("cls", CLASSES)
def test_one_accumulation_step_is_adam(cls, dtype, tolerance, weight_decay, foreach):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizers = [cls(ours, accumulation_steps=1, foreach=foreach, **options), TORCH_OF[cls](theirs, **options)]
    schedules = [LambdaLR(optimizer, lambda t: 1 / (1 + t)) for optimizer in optimizers]
    for t in range(12):
        for optimizer, params, schedule in zip(optimizers, [ours, theirs], schedules, strict=True):
            train(optimizer, params, 1, first=t)
            schedule.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("cls", CLASSES)
def test_equals_numpy_reference(cls, s, weight_decay, foreach):
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    n_steps = 3 * s + 2  # ends inside a window
    params = parameters(torch.float64)
    optimizer = cls(params, lr=0.01, accumulation_steps=s, foreach=foreach, **options)
    schedule = LambdaLR(optimizer, lambda t: 1 / (1 + t))
    grads = [random_tensors(t, torch.float64) for t in range(n_steps)]
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
        train(optimizer, params, 1, first=t)
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


@pytest.mark.usefixtures("eager_kernel")
@pytest.mark.parametrize("fused", [False, True])
def test_the_window_may_change_between_steps(fused):
    """From 1 on it begins an accumulator of zeros; to 1 it drops what an unfinished window has accumulated."""
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AccumAdamW([param], betas=(0.9, 0.98), weight_decay=0, accumulation_steps=1, fused=fused)
    accumulated = []
    for s in (1, 2, 3, 1, 4):
        optimizer.param_groups[0]["accumulation_steps"] = s
        param.grad = torch.full_like(param, 2.0)
        optimizer.step()
        accumulated.append(optimizer.state[param].get("accumulator", torch.tensor(-1.0)).mean().item())
    assert accumulated == pytest.approx([-1, 0, 0, -1, 0.5])  # k = 2 and 3 end windows of 2 and 3 steps


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cls", CLASSES)
def test_foreach_equals_loop_in_bfloat16(cls, weight_decay):
    fast, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {"lr": 0.01, "weight_decay": weight_decay, "accumulation_steps": 3}
    train(cls(fast, **options), fast, 8)
    train(cls(plain, foreach=False, **options), plain, 8)
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("cls", CLASSES)
def test_decay_never_writes_into_grad(cls, foreach):
    params = parameters()
    grads = random_tensors(1)
    versions = []
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
        versions.append(grad._version)
    optimizer = cls(params, weight_decay=0.5, accumulation_steps=2, foreach=foreach)
    for _ in range(3):
        optimizer.step()
    for param, grad, original, version in zip(params, grads, random_tensors(1), versions, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, original)
        assert grad._version == version


@pytest.mark.parametrize("foreach", [True, False])
def test_skipped_parameter_keeps_its_own_count(foreach):
    """Gradients at steps 0, 2, 3, 6 only: as if the other steps had not been."""
    s, options = 3, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    rare, steady, never = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(3))
    optimizer = AccumAdamW([rare, steady, never], lr=0.01, accumulation_steps=s, foreach=foreach, **options)
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
    together, alone = parameters(torch.float64), parameters(torch.float64)
    options = [
        {"lr": 0.01, "weight_decay": 0.1, "accumulation_steps": 2},
        {"lr": 0.03, "weight_decay": 0.0, "accumulation_steps": 3, "betas": (0.5, 0.6), "eps": 1e-4},
    ]
    one = AccumAdamW(
        [{"params": together[:3], **options[0]}, {"params": together[3:], **options[1]}], accumulation_steps=7
    )
    two = [AccumAdamW(alone[:3], **options[0]), AccumAdamW(alone[3:], **options[1])]
    for t in range(7):
        train(one, together, 1, first=t)
        for param, grad in zip(alone, random_tensors(t, torch.float64), strict=True):
            param.grad = grad
        for optimizer in two:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


def test_mixed_dtypes_in_one_group():
    params = [nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64)]
    optimizer = AccumAdam(params, lr=0.25, accumulation_steps=2)
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        optimizer.step()
    for param in params:
        assert all(optimizer.state[param][key].dtype == param.dtype for key in ("exp_avg", "accumulator"))
        # A constant gradient moves Adam by lr a step, up to bfloat16's 8 bits.
        torch.testing.assert_close(param, torch.full_like(param, 0.25), rtol=0, atol=0.02)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("channels_last_grad", [True, False])
def test_memory_layouts(channels_last_grad, foreach):
    """A channels_last parameter, with gradients of either layout, trains as a contiguous one."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
    last = nn.Parameter(start.clone(memory_format=torch.channels_last))
    plain = nn.Parameter(start.clone())
    optimizer = AccumAdam([last, plain], lr=0.01, weight_decay=0.1, accumulation_steps=2, foreach=foreach)
    for _ in range(5):
        grad = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
        last.grad = grad.contiguous(memory_format=torch.channels_last) if channels_last_grad else grad
        plain.grad = grad
        optimizer.step()
    torch.testing.assert_close(last, plain, rtol=1e-15, atol=0)
    for value in (last, *(optimizer.state[last][key] for key in ("exp_avg", "exp_avg_sq", "accumulator"))):
        assert value.is_contiguous(memory_format=torch.channels_last)


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    param = nn.Parameter(torch.ones(2))
    optimizer = AccumAdamW([param])

    def closure():
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (param < 1).all()


@pytest.mark.usefixtures("eager_kernel")
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_windows_of_one_step_follow_betas_that_move_as_torch_does(how):
    params = [nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(params[:1], lr=0.1), AccumAdamW(params[1:], lr=0.1, accumulation_steps=1, **how)]
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


@pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])
def test_segments_of_flat_vectors_equal_the_optimizer(cls):
    """Two parameters in one flat vector, updated segment by segment across their boundary, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(30, generator=generator)
    params = [nn.Parameter(start[:18].clone().view(6, 3)), nn.Parameter(start[18:].clone())]
    optimizer = cls(params, lr=0.01, weight_decay=0.1, accumulation_steps=3)
    flat = start.clone()
    state = [torch.zeros(30) for _ in range(3)]
    for k in range(1, 9):
        grad = torch.randn(30, generator=generator)
        params[0].grad, params[1].grad = grad[:18].view(6, 3), grad[18:]
        optimizer.step()
        for segment in (slice(0, 11), slice(11, 22), slice(22, 30)):
            accum_adam_update(
                [flat[segment]],
                [grad[segment]],
                *([tensor[segment]] for tensor in state),
                [k],
                Hyper.of(optimizer.param_groups[0], cls.decoupled_weight_decay),
            )
    assert torch.equal(flat, torch.cat([param.detach().flatten() for param in params]))


@pytest.mark.parametrize("foreach", [True, False])
def test_steps_may_differ_and_are_not_written(foreach):
    """Tensors of one call at different counts: each is updated as if it were alone."""
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "accumulators")
    generator = torch.Generator().manual_seed(0)
    columns = {name: [torch.rand(5, generator=generator) for _ in range(4)] for name in names}
    copies = {name: [tensor.clone() for tensor in tensors] for name, tensors in columns.items()}
    steps = [4, 5, 8, 4]
    hyper = Hyper(lr=0.01, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True, s=4)
    accum_adam_update(**columns, steps=steps, hyper=hyper, foreach=foreach)
    for i, k in enumerate(steps):
        accum_adam_update(
            **{name: [tensors[i]] for name, tensors in copies.items()}, steps=[k], hyper=hyper, foreach=foreach
        )
    assert steps == [4, 5, 8, 4]
    for name in names:
        for a, b in zip(columns[name], copies[name], strict=True):
            assert torch.equal(a, b)
    committed = [not accumulator.any() for accumulator in columns["accumulators"]]
    assert committed == [True, False, True, True]


def test_lists_of_different_length_are_refused():
    tensors = [torch.zeros(2)]
    hyper = Hyper(lr=0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True, s=4)
    with pytest.raises(ValueError, match=r"equal length, got \[1, 0, 1, 1, 1\] tensors and 1 steps"):
        accum_adam_update(tensors, [], tensors, tensors, tensors, [1], hyper)
