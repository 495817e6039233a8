"""Waits in a model's layers: as long as asked, where gradients become ready, and nothing else changes."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from common.cli import UsageError
from common.launch.compose import compose_config
from common.planner.cluster import Variation
from common.training.task import load_task
from scripts.emulate import program as emulate
from scripts.emulate.compute import Waiter
from scripts.emulate.program import EmulateArguments, slowed
from scripts.emulate.slowed import Waits


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of all waits, which are not waited for."""
    seconds: list[float] = []
    monkeypatch.setattr(Waiter, "wait", lambda self, s: seconds.append(s))
    return seconds


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("cnn", []),
        pytest.param("gpt2", ["experiment=gpt2_fair"], marks=pytest.mark.slow),
        pytest.param("transformer", ["experiment=table2_fair"], marks=pytest.mark.slow),
    ],
)
def test_a_step_waits_as_long_as_asked(task: str, more: list[str], wanted: list[float]) -> None:
    class_ = load_task(task)
    torch.manual_seed(0)
    config = compose_config(task, [*more, "workers.count=1", "workers.per_host=1"])
    model = class_(config).build_model()
    batch = next(class_(config).train_data(0, 1, 4 if task != "transformer" else 128, torch.device("cpu")).epoch(0))
    plain, trained = copy.deepcopy(model), class_(config)
    Waits(model, 100.0, Variation(factor=1.5, seed=(0, 0)))
    for module in (plain, model, model):
        wanted.clear()
        module.zero_grad()
        torch.manual_seed(1)
        trained.loss(module, batch).backward()
    assert sum(wanted) == pytest.approx(0.15, rel=0.01)
    for (name, slow), fast in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(slow.grad, fast.grad), name
    wanted.clear()
    with torch.no_grad():
        trained.loss(model.eval(), batch)
    assert not wanted


def test_gradients_are_ready_after_their_waits(wanted: list[float]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ready: list[int] = []
    for layer in model:
        layer.weight.register_hook(lambda _: ready.append(len(wanted)))
    Waits(model, 60.0, Variation(seed=(0, 0)))
    model(torch.ones(1, 2)).sum().backward()
    np.testing.assert_allclose(wanted, [0.01, 0.01, 0.02, 0.02])
    assert ready == [3, 4]  # both layers' forward waits, then one more before each gradient


def test_only_a_task_can_be_slowed() -> None:
    arguments = EmulateArguments(compute_ms=10, run="-m cnn.train seed=1")
    assert slowed(arguments) == ["-m", "scripts.emulate.slowed", "cnn.train", "seed=1"]
    assert json.loads(emulate.described(arguments)["EMULATED_HOSTS"])["compute_ms"] == 10
    assert slowed(EmulateArguments(run="a.py b")) == ["a.py", "b"]
    with pytest.raises(UsageError, match=r'run="a\.py b" with compute_ms: expected a task'):
        slowed(EmulateArguments(compute_ms=10, run="a.py b"))
