"""State: what it holds, round trips bit for bit inside a window; and bad arguments, refused by name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from common.optim import AccumAdam, AccumAdamW
from common.optim.flat_state import STATE_NAMES


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2)).to(dtype)
    model[0].to(memory_format=torch.channels_last)
    return model, AccumAdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)


def train(model, optimizer, steps):
    for t in steps:
        torch.manual_seed(100 + t)
        for i, param in enumerate(model.parameters()):
            param.grad = None if (i == 3 and t % 2) else torch.randn(param.shape).to(param)
        optimizer.step()


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("s", "stop"), [(4, 4), (4, 6), (1, 3)])
def test_resume_in_a_window_continues_bit_for_bit(s, stop, dtype):
    """At the end of a window, inside one; windows of one step have no accumulator."""
    model, optimizer = make(dtype, accumulation_steps=s)
    train(model, optimizer, range(stop))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(stop, 11))

    resumed, resumed_optimizer = make(dtype, accumulation_steps=9)  # the saved option must win
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(stop, 11))

    names = STATE_NAMES if s > 1 else STATE_NAMES[:2]
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        state, resumed_state = optimizer.state[a], resumed_optimizer.state[b]
        assert set(state) == {"step", "windows", *names}
        assert state["step"] == resumed_state["step"]
        for key in names:
            value = state[key]
            assert torch.equal(value, resumed_state[key])
            assert value.dtype == resumed_state[key].dtype
            assert value.stride() == resumed_state[key].stride()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("s", [1, 4])
def test_copies_continue_alike(copier, s):
    model, optimizer = make(accumulation_steps=s)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["accumulation_steps"] = 4  # accumulators are made at the next gradient
    other_model, other_optimizer = copier((model, optimizer))
    for pair in ((model, optimizer), (other_model, other_optimizer)):
        train(*pair, range(3, 7))
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_counts_of_a_loaded_state_are_ints_of_its_own_also_from_tensors():
    model, optimizer = make()
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["state"][1]["step"] = torch.tensor(2)
    other_model, other = make()
    other.load_state_dict(saved)
    train(other_model, other, range(2, 4))
    assert saved["state"][0]["step"] == saved["state"][1]["step"] == 2
    assert [state["step"] for state in other.state.values()] == [4, 4, 4, 2]  # one has no gradient at odd steps
    assert all(type(state["step"]) is int for state in other.state.values())


def test_init_state_allocates_zeros_and_keeps_what_is_there():
    model, optimizer = make()
    params = list(model.parameters())
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    before = copy.deepcopy(optimizer.state[params[0]])
    optimizer.init_state()
    assert set(optimizer.state) == set(params)
    after = optimizer.state[params[0]]
    assert after["step"] == before["step"] == 1
    assert all(torch.equal(after[key], before[key]) for key in STATE_NAMES)
    for param in params[1:]:
        assert optimizer.state[param]["step"] == 0
        assert not any(optimizer.state[param][key].any() for key in STATE_NAMES)
    assert optimizer.state[params[0]]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("keep_groups", [True, False])
def test_state_of_another_optimizer_is_refused(keep_groups):
    model, optimizer = make()
    adam = torch.optim.AdamW(model.parameters())
    train(model, adam, range(2))
    saved = adam.state_dict()
    if keep_groups:
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="accumulator" if keep_groups else "accumulation_steps"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state  # nothing half loaded


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", torch.tensor(0.1), "a finite number >= 0"),
        ("eps", -1e-8, "a finite number >= 0"),
        ("weight_decay", float("inf"), "a finite number >= 0"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), r"a number in \[0, 1\)"),
        ("accumulation_steps", 0, "an integer >= 1"),
        ("foreach", "yes", "a bool or None"),
    ],
)
@pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])
def test_bad_arguments(cls, name, value, expected):
    param = nn.Parameter(torch.ones(1))
    message = rf"{cls.__name__}: {name}.*expected {expected}"
    with pytest.raises(ValueError, match=message):
        cls([param], **{name: value})
    with pytest.raises(ValueError, match=message):
        cls([{"params": [param], name: value}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_dtypes_that_cannot_be_trained(dtype):
    with pytest.raises(ValueError, match=rf"AccumAdam: parameter of shape \(2,\) has dtype {dtype}"):
        AccumAdam([torch.zeros(2, dtype=dtype)])
    optimizer = AccumAdam([torch.zeros(2)])
    with pytest.raises(ValueError, match=f"has dtype {dtype}"):
        optimizer.add_param_group({"params": torch.zeros(2, dtype=dtype)})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradient():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = AccumAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(4, 2\) has layout torch.sparse_coo.*sparse=False"):
        optimizer.step()
