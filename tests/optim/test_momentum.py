"""DmSGD and QGDmSGD: alone they are known optimizers. Mixed, see also tests/distributed/test_matrix_form.py."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import DmSGD, QGDmSGD

CLASSES = pytest.mark.parametrize("cls", [DmSGD, QGDmSGD])


def pairs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=dtype) for shape in [(4, 3), (3,), ()]]
    return [nn.Parameter(x.clone()) for x in start], [nn.Parameter(x.clone()) for x in start]


def set_grads(params, t):
    generator = torch.Generator().manual_seed(t + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.05), (0.0, 0.0)])
def test_alone_equals_torch_sgd_bit_for_bit(momentum, weight_decay, dtype):
    ours, theirs = pairs(dtype)
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay}
    optimizers = [DmSGD(ours, **options), torch.optim.SGD(theirs, **options)]
    for t in range(5):
        set_grads(ours, t)
        set_grads(theirs, t)
        if t in (0, 3):  # no gradient: no decay, no momentum, no move
            ours[1].grad = theirs[1].grad = None
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_init_state_is_eager_and_keeps_layout_and_values():
    param = nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = DmSGD([param], lr=0.1)
    optimizer.init_state()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert not buffer.any()
    assert buffer.is_contiguous(memory_format=torch.channels_last)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.init_state()
    assert optimizer.state[param]["momentum_buffer"] is buffer
    assert (buffer == 1).all()


@pytest.mark.parametrize("mu", [None, 0.7])
def test_alone_it_is_quasi_hyperbolic_momentum(mu):
    """arXiv 1810.06801: a <- b a + (1-b) g; x <- x - r ((1-v) g + v a); b, v and r follow from beta and mu."""
    lr, beta = 0.1, 0.9
    mu_used = beta if mu is None else mu
    b = mu_used + (1 - mu_used) * beta
    v, r = beta / b, lr / (1 - beta)
    param = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    optimizer = QGDmSGD([param], lr=lr, momentum=beta, tracking=mu)
    x, a = param.detach().numpy().copy(), np.zeros(7)
    rng = np.random.default_rng(0)
    for _ in range(30):
        g = rng.normal(size=7)
        param.grad = torch.tensor(g)
        optimizer.step()
        a = b * a + (1 - b) * g
        x = x - r * ((1 - v) * g + v * a)
        np.testing.assert_allclose(param.detach().numpy(), x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_halves_with_mixing_are_the_published_rule(nesterov, monkeypatch):
    """Three workers, a doubly stochastic W: the halves, mixed here by hand, against numpy; lr changes, even to 0."""
    monkeypatch.setattr("common.optim.foreach.CPU_CHUNK_BYTES", 16)
    w = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
    beta, mu, decay = 0.9, 0.8, 0.01
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(3, 4)), np.zeros((3, 4))
    params = [nn.Parameter(torch.tensor(row)) for row in x]
    options = {"momentum": beta, "tracking": mu, "nesterov": nesterov, "weight_decay": decay}
    optimizers = [QGDmSGD([p], lr=0.1, **options) for p in params]
    for optimizer in optimizers:
        optimizer.deferred = True
    for lr in (0.1, 0.1, 0.01, 0.0, 0.05):
        g = rng.normal(size=(3, 4))
        for param, row, optimizer in zip(params, g, optimizers, strict=True):
            param.grad = torch.tensor(row)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 7.0  # the schedule may step before the exchange: not this step's lr
        with torch.no_grad():
            mixed = torch.tensor(w) @ torch.stack(params)
            for param, row in zip(params, mixed, strict=True):
                param.copy_(row)
        for optimizer in optimizers:
            optimizer.track()

        g = g + decay * x
        step = beta * m + g
        if nesterov:
            step = g + beta * step
        after = w @ (x - lr * step)
        if lr > 0:
            m = mu * m + (1 - mu) * (x - after) / lr
        x = after
        np.testing.assert_allclose(torch.stack(params).detach().numpy(), x, rtol=1e-11)
        momenta = [o.state[p]["momentum_buffer"] for p, o in zip(params, optimizers, strict=True)]
        np.testing.assert_allclose(torch.stack(momenta).numpy(), m, rtol=1e-9, atol=1e-12)


@CLASSES
def test_no_grad_is_written_and_layout_is_kept(cls):
    param = nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = cls([param], lr=0.1, weight_decay=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (param.grad == 1).all()
    assert optimizer.state[param]["momentum_buffer"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [torch.optim.SGD, DmSGD, QGDmSGD])
def test_continuing_from_a_state_dict_changes_no_bit(kind):
    """DmSGD continues one of torch's SGD too."""
    ours, theirs = pairs()
    first = kind(ours, lr=0.1, momentum=0.9)
    for t in range(3):
        set_grads(ours, t)
        first.step()
    for a, b in zip(theirs, ours, strict=True):
        a.data.copy_(b.data)
    second = (QGDmSGD if kind is QGDmSGD else DmSGD)(theirs, lr=0.3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for params, optimizer in ((ours, first), (theirs, second)):
        set_grads(params, 3)
        optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("cls", "missing"), [(DmSGD, "momentum"), (QGDmSGD, "tracking")])
def test_state_of_another_optimizer_is_refused(cls, missing):
    params, _ = pairs()
    adam, optimizer = torch.optim.Adam(params), cls(params, lr=0.1)
    set_grads(params, 0)
    adam.step()
    saved = adam.state_dict()
    with pytest.raises(ValueError, match=f"{cls.__name__}: parameter group 0 has no .*'{missing}'.* expected a state"):
        optimizer.load_state_dict(saved)
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=f"{cls.__name__}: the state of a parameter has no .*'momentum_buffer'"):
        optimizer.load_state_dict(saved)


@CLASSES
def test_copies_step_by_themselves(cls):
    params, _ = pairs()
    options = {"momentum_mixing": False} if cls is DmSGD else {}
    optimizer = cls(params, lr=0.1, **options)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.deferred = True
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.deferred is False
        assert getattr(other, "momentum_mixing", False) is False
        copied = other.param_groups[0]["params"]
        set_grads(copied, 0)
        other.step()
        assert all(other.state[param]["momentum_buffer"].any() for param in copied)


@CLASSES
def test_a_compiled_step_is_the_same(cls):
    of_both = pairs()
    optimizers = [cls(params, lr=0.1) for params in of_both]
    for step in (optimizers[0].step, torch.compile(optimizers[1].step, backend="eager")):
        for params in of_both:
            set_grads(params, 0)
        step()
    assert all(torch.equal(a, b) for a, b in zip(*of_both, strict=True))


BAD = [
    ("lr", -0.1, "a finite number >= 0"),
    ("momentum", 1.0, r"a number in \[0, 1\)"),
    ("weight_decay", -1, "a finite number >= 0"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "expected"),
    [*((cls, *bad) for cls in (DmSGD, QGDmSGD) for bad in BAD), (QGDmSGD, "tracking", 1.0, r"a number in \[0, 1\)")],
)
def test_bad_arguments(cls, name, value, expected):
    param = nn.Parameter(torch.ones(1))
    for params, options in (([param], {name: value}), ([{"params": [param], name: value}], {})):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: {name}={value}: expected {expected}"):
            cls(params, **{"lr": 0.1} | options)


@CLASSES
def test_sparse_gradient(cls):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = cls(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{cls.__name__}: gradient of the parameter of shape"):
        optimizer.step()
