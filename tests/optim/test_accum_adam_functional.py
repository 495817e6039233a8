"""The update as a function of lists, as an engine with flat vectors calls it."""

import pytest
import torch
from torch import nn

from common.optim import AccumAdam, AccumAdamW, Hyper, accum_adam_update


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
