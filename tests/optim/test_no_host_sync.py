"""No optimizer or schedule makes the host wait for the device: it has to run ahead of a GPU."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.flat import FlatVector
from common.optim import AccumAdam, AccumAdamW, Cosine, DmSGD, Hyper, QGDmSGD, compiled
from tests.host_sync import NoHostSync

pytestmark = pytest.mark.usefixtures("eager_kernel")
ACCUM = {"weight_decay": 0.1, "accumulation_steps": 2}
OPTIMIZERS = [
    partial(DmSGD, lr=0.1, weight_decay=0.1),
    partial(QGDmSGD, lr=0.1, weight_decay=0.1, nesterov=True),
    *(
        partial(cls, **ACCUM, **how)
        for cls in (AccumAdam, AccumAdamW)
        for how in ({"fused": True}, {"foreach": False}, {})
    ),
]


def train(make: Callable[..., Optimizer], prepare: Callable[[Optimizer, list[FlatVector]], None]) -> None:
    """Take 4 steps with a schedule, on parameters of which one is a number and one gets no gradient."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (), (5,), (2,))]
    optimizer = make(parameters)
    schedule = LambdaLR(optimizer, Cosine(total_steps=9, warmup_steps=2))
    prepare(optimizer, [FlatVector([(str(index), parameter) for index, parameter in enumerate(parameters)])])
    with NoHostSync():
        for _ in range(4):
            sum(parameter.square().sum() for parameter in parameters[:-1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=str)
def test_alone(make: Callable[..., Optimizer]) -> None:
    train(make, lambda *_: None)


def test_scalars_travel_to_a_gpu_from_pinned_memory() -> None:
    """Without one: what is asked of torch."""
    hyper = Hyper(0.1, 0.9, 0.99, 1e-8, 0.0, decoupled=False, s=1)
    place = mock.Mock(dtype=torch.float32)
    with mock.patch.object(torch, "tensor") as made, mock.patch.object(compiled, "_places") as places:
        places.return_value = {}, [place]
        scalars = compiled.scalars_of(1, hyper, 1.0, 0.0, torch.bfloat16, torch.device("cuda"))
    places.assert_called_once_with(torch.float32, torch.device("cuda"))
    assert made.call_args.kwargs == {"dtype": torch.float32, "device": "cpu", "pin_memory": True}
    place.copy_.assert_called_once_with(made.return_value, non_blocking=True)
    assert scalars is place.copy_.return_value


def test_scalars_of_all_steps_share_memory() -> None:
    """Else those of one step would split the memory that gradients take and give back in the next."""
    compiled._places.cache_clear()
    hyper = Hyper(0.1, 0.9, 0.99, 1e-8, 0.0, decoupled=False, s=1)
    arguments = hyper, 0.75, 0.25, torch.float64, torch.device("cpu")
    seen = [compiled.scalars_of(k, *arguments) for k in range(1, 3 * compiled.KEPT)]
    assert len({scalars.data_ptr() for scalars in seen}) == compiled.KEPT
    again = compiled.scalars_of(3 * compiled.KEPT - 1, *arguments)
    assert again is seen[-1]
    compiled._places.cache_clear()
    for k in (2 * compiled.KEPT, 3 * compiled.KEPT - 1):  # the oldest that is valid, and the last one
        torch.testing.assert_close(seen[k - 1], compiled.scalars_of(k, *arguments), rtol=0, atol=0)
