"""Metrics and effects of an evaluation, against direct computations on three workers that differ."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cnn.config import CnnConfig
from cnn.task import TASK
from common.launch.compose import compose_config
from common.training.evaluation import RECALIBRATION_SEED, Evaluator
from common.training.stream import RandomState
from common.training.worker import Worker, build_workers

CPU = torch.device("cpu")


def prepare(*overrides: str) -> tuple[CnnConfig, TASK, list[Worker]]:
    """Return three simulated workers with different parameters and BatchNorm statistics."""
    sizes = ["workers=simulated", "workers.count=3", "training.batch_size=96", "model.width=4"]
    config = compose_config("cnn", [*sizes, *overrides])
    task = TASK(config)
    workers = build_workers(task, config, CPU, 0, 10, 10)
    generator = torch.Generator().manual_seed(0)
    for worker in workers:
        for tensor in worker.model.module.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand(tensor.shape, generator=generator)
    return config, task, workers


def evaluate(config: CnnConfig, task: TASK, workers: list[Worker]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics, and the state of the mean model."""
    seen: list[Any] = []
    Evaluator(task, workers, config, CPU, 0).evaluate(
        lambda metrics, model: seen.extend([metrics, copy.deepcopy(model.state_dict())])
    )
    return seen[0], seen[1]


def states(workers: list[Worker]) -> list[dict[str, torch.Tensor]]:
    return [copy.deepcopy(worker.model.module.state_dict()) for worker in workers]


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the loss summed over the images."""
    with torch.no_grad():
        return float(-model.eval()(images).log_softmax(1)[torch.arange(len(labels)), labels].sum())


def mean_of(saved: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([s[name].double() for s in saved]).mean(0) for name in saved[0]}


def test_the_mean_model_is_evaluated_and_nothing_is_left_of_it() -> None:
    config, task, workers = prepare()
    before = states(workers)
    metrics, mean = evaluate(config, task, workers)
    for name, value in mean_of(before).items():
        torch.testing.assert_close(mean[name].double(), value, rtol=1e-6, atol=1e-6)
    bare = task.build_model()
    bare.load_state_dict(mean)
    ((images, labels),) = task.evaluation_data(0, 1, 1000, CPU)
    assert metrics["loss"] == pytest.approx(loss(bare, images, labels) / len(labels), rel=1e-5)
    for one, other in zip(before, states(workers), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_local_models_answer_for_their_own_shards() -> None:
    config, task, workers = prepare("evaluation.local_models=true")
    total = 0.0
    for index, worker in enumerate(workers):
        ((images, labels),) = task.evaluation_data(index, 3, 1000, CPU)
        total += loss(copy.deepcopy(worker.model.module), images, labels)
    metrics, _ = evaluate(config, task, workers)
    assert metrics["local_loss"] == pytest.approx(total / 360, rel=1e-5)
    assert metrics["local_loss"] != pytest.approx(metrics["loss"], rel=1e-3)


def test_recalibration_takes_the_statistics_of_training_batches() -> None:
    config, task, workers = prepare("evaluation.recalibrate_batches=2")
    before = states(workers)
    _, mean = evaluate(config, task, workers)
    bare = task.build_model()
    bare.load_state_dict(mean_of(before) | {k: v for k, v in before[0].items() if v.dtype == torch.int64})
    inputs: list[torch.Tensor] = []
    bare.bn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    for rank in range(3):
        with RandomState(RECALIBRATION_SEED + rank, CPU).active(), torch.no_grad():
            for _, (images, _) in zip(range(2), task.train_data(rank, 3, 32, CPU).epoch(0), strict=False):
                bare(images)
    expected = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    torch.testing.assert_close(mean["bn.running_mean"], expected, rtol=1e-4, atol=1e-5)
    variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in inputs]).mean(0)
    torch.testing.assert_close(mean["bn.running_var"], variances, rtol=1e-4, atol=1e-5)
    for one, other in zip(before, states(workers), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_kept_average_replaces_every_worker() -> None:
    config, task, workers = prepare("evaluation.keep_average=true")
    before = states(workers)
    metrics, mean = evaluate(config, task, workers)
    assert metrics["consensus_distance"] > 0.1
    for state in states(workers):
        for name, value in mean_of(before).items():
            torch.testing.assert_close(state[name].double(), value, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(state[name], mean[name], rtol=1e-6, atol=1e-6)
    assert workers[0].model.consensus_distance() < 1e-5
