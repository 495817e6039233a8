"""Computing replaced by waits: as long as asked, with gradients one after another, and as uneven as predicted."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from common.planner.cluster import Cluster, Variation
from common.planner.conditions import CONDITIONS, Condition
from scripts.benchmarks import engines
from scripts.benchmarks.arguments import METHODS
from scripts.benchmarks.engines import EmulatedCompute, Waiter


class Clock:
    """Time that passes only in sleeps, which take a tenth too long."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += 1.1 * seconds


def test_gradients_come_one_after_another_last_layer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(engines, "time", clock)
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(9)))
    layers[8].weight.requires_grad_(False)
    model = EmulatedCompute(layers, compute_ms=120.0)
    assert list(model.parameters()) == list(layers.parameters())
    order = []
    for index, weight in enumerate([*layers.parameters()][:8]):
        weight.register_post_accumulate_grad_hook(lambda _, i=index: order.append((i, clock.perf_counter())))
    loss = model()
    assert clock.perf_counter() == pytest.approx(0.040, abs=0.001)
    loss.backward()
    assert clock.perf_counter() == pytest.approx(0.120, abs=0.001)
    assert [index for index, _ in order] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [when for _, when in order] == pytest.approx([0.040 + 0.010 * i for i in range(1, 9)], abs=0.002)
    assert layers[8].weight.grad is None
    first = layers[0].weight.grad.clone()
    layers.zero_grad()
    model().backward()
    assert torch.equal(layers[0].weight.grad, first)


def waits(monkeypatch: pytest.MonkeyPatch, steps: int, variation: Variation) -> np.ndarray:
    """Seconds that each step of 100 ms wants to wait."""
    wanted, found = [], []
    monkeypatch.setattr(Waiter, "wait", lambda self, seconds: wanted.append(seconds))
    model = EmulatedCompute(nn.Linear(2, 2), 100.0, variation)
    for _ in range(steps):
        wanted.clear()
        model().backward()
        found.append(sum(wanted))
    return np.array(found)


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_emulated_is_what_is_predicted(
    condition: Condition, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = condition.on(Cluster(hosts=2, workers_per_host=2, compute_ms=100.0)).draw_compute_ms(200, seed=7)
    factor = condition.slow_host if rank < 2 else 1.0
    got = waits(monkeypatch, 200, condition.variation_of(factor, (7, rank)))
    assert got == pytest.approx(predicted[:, rank] / 1000)


@pytest.mark.parametrize(("method", "hook"), [("allreduce", None), ("allreduce_fp16", "fp16")])
def test_all_reduce_with_and_without_fp16_gradients(method: str, hook: str | None, monkeypatch) -> None:
    wrapped = Mock()
    monkeypatch.setattr("common.parallel.AllReduceDataParallel", wrapped)
    module = nn.Linear(2, 2)
    engines.engine_of(METHODS[method].engine, module, METHODS[method].topology, 0.5, 1)
    wrapped.assert_called_once_with(module, bucket_mb=0.5, hook=hook)
