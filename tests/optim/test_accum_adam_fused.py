"""The compiled kernel against the definition, on all layouts of parameters."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from common.flat import Bucket, FlatVector, cut
from common.optim import AccumAdam, AccumAdamW, compiled
from common.optim.compiled import fused_kernel
from common.optim.flat_state import Incoming
from tests.optim.accum_reference import accum_adam_reference

eager = pytest.mark.usefixtures("eager_kernel")


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_one_compiled_kernel_with_threads_serves_all_shapes() -> None:
    """Compile time must not grow with the number of tensors, nor with the steps and the learning rate.

    The first vector is short, and the compiler keeps what it made for it.
    """
    models = [[nn.Parameter(randn(0, size)) for size in (100, 3, 8, 1000)] for _ in range(2)]
    optimizers = [AccumAdam(models[index], accumulation_steps=4, fused=index == 0) for index in range(2)]

    def train() -> None:
        for step in range(3):
            for optimizer, params in zip(optimizers, models, strict=True):
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                for param in params:
                    param.grad = randn(step, *param.shape)
                optimizer.step()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    fused_kernel.cache_clear()
    torch._dynamo.utils.counters.clear()
    try:
        with config.patch(fx_graph_cache=False):  # which keeps no source
            _, sources = run_and_get_code(train)
    finally:
        torch.set_num_threads(threads)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(sources) == 1
    assert "#pragma omp parallel" in sources[0]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)


@eager
@pytest.mark.parametrize("version", [{"foreach": True}, {"fused": True}], ids=str)
def test_every_layout_equals_the_plain_loop(version: dict[str, bool]) -> None:
    """float32, bfloat16; scalars, empty tensors, channels_last weights with gradients of either layout, views."""
    last = [randn(seed, 4, 3, 3, 3).to(memory_format=torch.channels_last) for seed in range(2)]
    starts = [*last, randn(2, 5, 4).t(), randn(3), randn(4, 0, 3), randn(5, 17), randn(6, 33).bfloat16()]
    models = [[nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    options = {"lr": 0.01, "weight_decay": 0.1, "accumulation_steps": 2}
    optimizers = [AccumAdamW(models[0], **options, foreach=False), AccumAdamW(models[1], **options, **version)]
    for step in range(5):
        for index, start in enumerate(starts):
            grad = randn(100 * step + index, *start.shape).to(start.dtype)
            for model in models:
                given = torch.empty_like(start).copy_(grad) if index == 0 else grad.clone()
                model[index].grad = None if step == 2 and index == 5 else given
        for optimizer in optimizers:
            optimizer.step()
    for plain, other in zip(*models, strict=True):
        assert other.stride() == plain.stride()
        states = [optimizers[0].state[plain]["accumulator"], optimizers[1].state[other]["accumulator"]]
        assert states[1].stride() == states[0].stride()
        tolerance = 2**-5 if plain.dtype == torch.bfloat16 else 1e-6  # 4 units: the loop rounds each pass
        torch.testing.assert_close(other, plain, rtol=tolerance, atol=tolerance)


@eager
def test_buckets_with_merging_equal_the_definition() -> None:
    """x <- own x + weight r first, then the update; elements without a gradient are merged only."""
    rng = np.random.default_rng(1)
    start, grad = (rng.standard_normal((5, 4)) for _ in range(2))
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    param, frozen = (nn.Parameter(torch.from_numpy(start.copy())) for _ in range(2))
    vector = FlatVector([("trained", param), ("without a gradient", frozen)])
    received = torch.from_numpy(rng.standard_normal(vector.numel))
    theirs = [received[slot.offset : slot.offset + 20].view(5, 4).numpy() for slot in vector.slots]
    merged, only_merged = (0.25 * start + 0.5 * r for r in theirs)
    (expected,) = accum_adam_reference(merged, [grad], **options, s=1, decoupled=True)
    optimizer = AccumAdamW([param, frozen], **options, accumulation_steps=1, fused=True)
    optimizer.flatten_state([vector], place_gradients=False)
    param.grad = torch.from_numpy(grad)
    version = param._version
    spans = [slice(0, 7), slice(7, 8), slice(8, 30), slice(30, vector.numel)]
    optimizer.arriving = lambda: ((Bucket(0, span), Incoming(received[span], 0.25, 0.5)) for span in spans)
    optimizer.step()
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(frozen.detach().numpy(), only_merged, rtol=1e-12)
    assert param._version > version
    assert int(optimizer.state[param]["step"]) == 1
    assert frozen not in optimizer.state


def flat_and_alone(groups: list[dict], **options: object) -> tuple[list[AccumAdamW], FlatVector]:
    """Return two optimizers of equal parameters, those of the first one in a flat vector that backward fills."""
    optimizers = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        sized = [
            group | {"params": [nn.Parameter(torch.randn(n, generator=generator)) for n in group["params"]]}
            for group in groups
        ]
        optimizers.append(AccumAdamW(sized, lr=0.1, accumulation_steps=2, fused=True, **options))
    first = [param for group in optimizers[0].param_groups for param in group["params"]]
    vector = FlatVector([(str(index), param) for index, param in enumerate(first[::2] + first[1::2])])
    optimizers[0].flatten_state([vector], place_gradients=True)
    return optimizers, vector


def train(optimizer: AccumAdamW, steps: int, seed: int, without: int | None = None) -> None:
    """Run backward passes whose gradients do not depend on the parameters, and step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        factors = [torch.randn(param.shape, generator=generator) for param in params]
        used = [i for i in range(len(params)) if i != without]
        sum((params[i] * factors[i]).sum() for i in used).backward()
        optimizer.step()


def values(optimizer: AccumAdamW) -> list[torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.detach() for param in params] + [optimizer.state[p]["exp_avg"] for p in params]


@eager
@pytest.mark.parametrize("decays", [(0.1, 0.1), (0.1, 0.0)])
def test_a_flat_vector_equals_its_tensors_one_by_one(decays: tuple[float, float]) -> None:
    """Bit for bit, with and without decay in one vector; a parameter without a gradient in some steps is skipped."""
    groups = [{"params": [5, 40], "weight_decay": decays[0]}, {"params": [17, 3, 64], "weight_decay": decays[1]}]
    optimizers, vector = flat_and_alone(groups)
    for optimizer in optimizers:
        train(optimizer, 3, seed=1)
        train(optimizer, 2, seed=2, without=1)
        train(optimizer, 2, seed=3)
    for flat, alone in zip(*map(values, optimizers), strict=True):
        assert torch.equal(flat, alone)
    padding = torch.ones_like(vector.data, dtype=torch.bool)
    for slot in vector.slots:
        padding[slot.offset : slot.offset + slot.numel] = False
    assert not vector.data[padding].any()


def test_a_group_is_one_kernel_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its parameters lay in the vector; groups of equal hyperparameters share one."""
    sizes: list[int] = []
    monkeypatch.setattr(compiled, "fused_kernel", lambda *_: lambda _, x, *others: sizes.append(x.numel()))
    groups = [{"params": [5, 40, 70], "weight_decay": 0.1}, {"params": [17, 3], "weight_decay": 0.0}]
    (optimizer, _), vector = flat_and_alone(groups)
    train(optimizer, 1, seed=0)
    assert len(sizes) == 2
    assert sum(sizes) == vector.numel
    optimizer.param_groups[1]["weight_decay"] = 0.1
    train(optimizer, 1, seed=0)
    assert sizes[2:] == [vector.numel]


@eager
def test_backward_puts_gradients_into_their_vector() -> None:
    """So no step copies them; they accumulate there, and `zero_grad` of either kind works."""
    (optimizer, _), vector = flat_and_alone([{"params": [5, 3], "weight_decay": 0.0}])
    params = optimizer.param_groups[0]["params"]
    for _ in range(2):
        sum((param * 2).sum() for param in params).backward()
    addresses = [param.grad.data_ptr() for param in params]
    assert addresses[1] - addresses[0] == 4 * vector.slots[1].offset
    assert all(torch.equal(param.grad, torch.full_like(param, 4)) for param in params)
    optimizer.zero_grad(set_to_none=False)
    (params[0] * 3).sum().backward()
    assert torch.equal(params[0].grad, torch.full((5,), 3.0))
    optimizer.zero_grad()
    (params[0] * 5).sum().backward()
    assert params[1].grad is None
    assert params[0].grad.data_ptr() == addresses[0]
    assert torch.equal(params[0].grad, torch.full((5,), 5.0))
    before = params[1].detach().clone()
    params[1].requires_grad_(False)
    optimizer.flatten_state([vector], place_gradients=True)
    params[1].requires_grad_(True)  # frozen when hooks were registered
    train(optimizer, 1, seed=0)
    assert not torch.equal(params[1], before)


@eager
def test_a_loaded_state_moves_into_the_vectors() -> None:
    optimizers, _ = flat_and_alone([{"params": [5, 40], "weight_decay": 0.1}])
    starts = [nn.Parameter(param.detach().clone()) for param in optimizers[1].param_groups[0]["params"]]
    optimizers.append(AccumAdamW(starts, lr=0.1, weight_decay=0.1, accumulation_steps=2, foreach=False))
    for optimizer in optimizers:
        train(optimizer, 3, seed=1)
        saved = copy.deepcopy(optimizer.state_dict())
        train(optimizer, 1, seed=5)
        optimizer.load_state_dict(saved)
        train(optimizer, 2, seed=2)
    for flat, alone, plain in zip(*map(values, optimizers), strict=True):
        assert torch.equal(flat, alone)
        torch.testing.assert_close(flat, plain, rtol=1e-5, atol=1e-6)


@eager
def test_the_write_is_seen_by_the_version_counter() -> None:
    """The engine finds writes to parameters in flight by it, autograd those to what backward needs."""
    param = nn.Parameter(torch.ones(4))
    optimizer = AccumAdam([param], fused=True)
    loss = (param * param).sum()
    before = param._version
    param.grad = torch.ones(4)
    optimizer.step()
    assert param._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@eager
def test_a_window_ends_with_zeros_whatever_was_accumulated() -> None:
    param = nn.Parameter(torch.zeros(4))
    optimizer = AccumAdam([param], accumulation_steps=2, fused=True)
    for _ in range(2):
        param.grad = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
        with torch.device("meta"):  # scalars must not begin on the default device
            optimizer.step()
    assert torch.equal(optimizer.state[param]["accumulator"], torch.zeros(4))


def test_fused_and_foreach_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="fused=True: expected False with foreach=True"):
        AccumAdam([nn.Parameter(torch.ones(2))], foreach=True, fused=True)


def test_a_parameter_with_gaps_is_refused() -> None:
    param = nn.Parameter(torch.ones(4, 6)[:, ::2])
    param.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and strides \(6, 2\): expected elements without gaps"):
        AccumAdam([param], fused=True).step()


@eager
def test_kernels_get_memory_that_is_aligned_as_wide_loads_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel would copy vectors that do not begin on 16 bytes, on a GPU."""
    begins: list[int] = []
    kernel = compiled.update_compiled

    def noted(vectors: compiled.Vectors, *arguments: object) -> None:
        begins.extend(tensor.data_ptr() for tensor in vectors if tensor is not None)
        kernel(vectors, *arguments)

    monkeypatch.setattr("common.optim.flat_state.update_compiled", noted)
    (optimizer, _), vector = flat_and_alone(
        [{"params": [5, 40], "weight_decay": 0.1}, {"params": [7, 33], "weight_decay": 0.0}]
    )
    spans = cut(vector.numel, 4, 128)
    optimizer.arriving = lambda: ((Bucket(0, s), Incoming(torch.zeros(s.stop - s.start), 0.5, 0.5)) for s in spans)
    train(optimizer, 1, seed=1)
    assert len(begins) >= 6 * len(spans) > 6
    assert all(begin % 16 == 0 for begin in begins)
