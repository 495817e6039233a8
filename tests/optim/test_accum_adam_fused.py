"""The compiled kernel against the definition, on all layouts of parameters."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

from common.optim import AccumAdam, AccumAdamW, compiled
from common.optim.compiled import JOINED_ELEMENTS, fused_kernel
from common.optim.piecewise import PiecewiseUpdate
from tests.optim.accum_reference import accum_adam_reference


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])
def test_equals_the_definition(cls, weight_decay: float, s: int) -> None:
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal(7), [rng.standard_normal(7) for _ in range(7)]
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    expected = accum_adam_reference(start, grads, **options, s=s, decoupled=cls.decoupled_weight_decay)
    param = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = cls([param], **options, accumulation_steps=s, fused=True)
    for grad, want in zip(grads, expected, strict=True):
        param.grad = torch.from_numpy(grad)
        optimizer.step()
        np.testing.assert_allclose(param.detach().numpy(), want, rtol=1e-12)


def test_equals_the_foreach_version_on_a_model_with_every_layout() -> None:
    """float32, bfloat16; scalars, empty tensors, channels_last weights with gradients of another layout, views."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    starts = [randn(4, 3, 3, 3).to(memory_format=torch.channels_last), randn(5, 4).t(), randn(), randn(0, 3)]
    starts += [randn(17), randn(33).bfloat16(), randn(100, 100)]
    models = [[nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    optimizers = [
        AccumAdamW(model, lr=0.01, weight_decay=0.1, accumulation_steps=2, fused=fused)
        for model, fused in zip(models, (False, True), strict=True)
    ]
    for step in range(5):
        for index, start in enumerate(starts):
            grad = randn(*start.shape).to(start.dtype)
            for model in models:
                model[index].grad = None if step == 2 and index == 4 else grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for plain, fused in zip(*models, strict=True):
        assert fused.stride() == plain.stride()
        tolerance = 2**-5 if plain.dtype == torch.bfloat16 else 1e-6  # 4 units: the foreach version rounds each pass
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)


def test_one_kernel_for_all_shapes() -> None:
    """Compile time must not grow with the number of tensors, nor with the steps and the learning rate."""
    torch._dynamo.reset()
    fused_kernel.cache_clear()
    counters = torch._dynamo.utils.counters
    counters.clear()
    params = [nn.Parameter(torch.ones(size)) for size in (3, 8, 64, 100, 1000)]
    optimizer = AccumAdam(params, accumulation_steps=4, fused=True)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 1


def test_the_kernel_has_threads_whatever_it_is_compiled_for() -> None:
    """A short vector comes first, and the compiler keeps what it made for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch._dynamo.reset()
        fused_kernel.cache_clear()
        param = nn.Parameter(torch.ones(100))
        param.grad = torch.ones_like(param)
        with fresh_cache():
            _, sources = run_and_get_code(AccumAdam([param], fused=True).step)
    finally:
        torch.set_num_threads(threads)
    assert len(sources) == 1
    assert "#pragma omp parallel" in sources[0]


def test_pieces_with_merging_equal_the_definition() -> None:
    """x <- own x + weight r first, then the update; elements without a gradient are merged only."""
    rng = np.random.default_rng(1)
    start, grad, received = (rng.standard_normal((5, 4)) for _ in range(3))
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    merged = 0.25 * start + 0.5 * received
    (expected,) = accum_adam_reference(merged, [grad], **options, s=1, decoupled=True)
    param, frozen = nn.Parameter(torch.from_numpy(start.copy())), nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = AccumAdamW([param, frozen], **options, accumulation_steps=1, fused=True)
    param.grad = torch.from_numpy(grad)
    version = param._version
    update, flat = PiecewiseUpdate(optimizer), torch.from_numpy(received).reshape(-1)
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        update.update([(p, begin, end, begin) for p in (param, frozen)], (flat, 0.25, 0.5))
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(frozen.detach().numpy(), merged, rtol=1e-12)
    assert param._version > version
    assert int(optimizer.state[param]["step"]) == 1
    assert frozen not in optimizer.state


def test_small_tensors_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group and dtype; where there is but one of them, it is not copied."""
    sizes: list[int] = []
    monkeypatch.setattr(compiled, "fused_kernel", lambda *_, **__: lambda _, x, *others: sizes.append(x.numel()))
    large = JOINED_ELEMENTS + 1
    groups = [[3, large, JOINED_ELEMENTS, 5], [7, large], [2, 4]]
    params = [[nn.Parameter(torch.ones(size)) for size in group] for group in groups]
    params[0].append(nn.Parameter(torch.ones(6, dtype=torch.float64)))
    for param in itertools.chain(*params):
        param.grad = torch.ones_like(param)
    AccumAdam([{"params": group} for group in params], fused=True).step()
    assert sizes == [large, 3 + JOINED_ELEMENTS + 5, 6, 7, large, 2 + 4]


def test_remembered_spans_follow_the_memory() -> None:
    """A state that is loaded and a parameter that moves lie elsewhere from then on."""

    def train(spans: dict | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=generator)) for size in (5, JOINED_ELEMENTS + 3)]
        optimizer = AccumAdamW(params, lr=0.1, accumulation_steps=2, fused=True)
        for step in range(4):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            if step == 2:
                saved = optimizer.state_dict()
                saved["state"] = {i: {k: v.clone() for k, v in kept.items()} for i, kept in saved["state"].items()}
                optimizer.load_state_dict(saved)
            if step == 3:
                params[0].data = params[0].data.clone()
            update = PiecewiseUpdate(optimizer, spans)
            update.update([(param, 0, param.numel(), 0) for param in params])
        return params, [kept["exp_avg"] for kept in optimizer.state.values()]

    for found, expected in zip(train({}), train(None), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


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


def test_a_window_ends_with_zeros_whatever_was_accumulated() -> None:
    param = nn.Parameter(torch.zeros(4))
    optimizer = AccumAdam([param], accumulation_steps=2, fused=True)
    for _ in range(2):
        param.grad = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
        optimizer.step()
    assert torch.equal(optimizer.state[param]["accumulator"], torch.zeros(4))


def test_fused_and_foreach_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="fused=True: expected False with foreach=True"):
        AccumAdam([nn.Parameter(torch.ones(2))], foreach=True, fused=True)
