"""The gradient noise scale of linear regression, where it is known, and runs that are measured or not."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.config.config import Config
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.noise_scale import LENGTH, noise_row, signal_and_noise, smoothed
from common.record.run_folder import fingerprint
from common.training.gradients import backward_of
from common.training.noise_meter import NoiseMeter
from common.training.recorder import Recorder
from common.training.worker import Worker, build_workers
from tests.training.runs import rows

CPU = torch.device("cpu")
SIZE, WORKERS, NOISE = 10, 4, 3.0
LAMBDA = torch.linspace(0.5, 2.0, SIZE)  # variances of the inputs
DELTA = torch.linspace(1.0, 0.1, SIZE)  # weights minus those that made the targets
V = torch.logspace(0, 2, SIZE)


class Regression:
    """Half the squared error of `x w`, x ~ N(0, diag(LAMBDA)), against targets of w = 0 with Gaussian noise."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(SIZE, 1, bias=False)
        model.weight.data.copy_(DELTA[None])
        return model

    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> "Draws":
        return Draws(batch_size)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return 0.5 * (model(inputs)[:, 0] - targets).square().mean()

    def samples(self, data: "Draws") -> float:
        return data.batch_size


class Draws:
    steps_per_epoch = batches_per_epoch = 10**6

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(self.batch_size, SIZE) * LAMBDA.sqrt(), NOISE * torch.randn(self.batch_size)


def expected(factors: Tensor) -> float:
    """Return tr(P Sigma P) / |P G|^2: G = Lambda d, Sigma = Lambda (d' Lambda d + NOISE^2) + G G'."""
    gradient = LAMBDA * DELTA
    variances = LAMBDA * (gradient @ DELTA + NOISE**2) + gradient**2
    return float((factors**2 * variances).sum() / (factors**2 * gradient**2).sum())


def prepared(*overrides: str) -> tuple[Config, list[Worker], NoiseMeter]:
    """Return workers of the regression whose second moments, of different updates, have the mean V."""
    sizes = ["workers=simulated", f"workers.count={WORKERS}", "logging.noise_scale_every=1", "optimizer.eps=1e-12"]
    config = compose_config("cnn", [*sizes, *overrides])
    workers = build_workers(Regression(), config, CPU, 0, 10, 10)
    gossip, beta2 = config.parallel.method == "decentralized", config.optimizer.betas[1]
    for worker in workers:
        v = V * (0.5 + worker.index / (WORKERS - 1)) if gossip else V
        state: dict[str, Any] = {"step": torch.tensor(3.0), "exp_avg_sq": v[None] * (1 - beta2**3)}
        if config.optimizer.name == "accumadam":  # after 3 windows
            state = {"step": 7, "windows": 3, "exp_avg_sq": v[None] * (1 - beta2**3) * beta2}
        worker.optimizer.state[worker.model.module.weight] = state
    meter = NoiseMeter()
    meter.begin(Regression(), workers, config)
    return config, workers, meter


def check(row: dict[str, float], local: int) -> None:
    for ending, factors in {"": torch.ones(SIZE), "_preconditioned": V**-0.5}.items():
        scale = expected(factors)
        assert row[f"noise_scale{ending}"] == pytest.approx(scale, rel=0.05)
        assert row[f"local_over_noise{ending}"] == pytest.approx(local / scale, rel=0.05)
        assert row[f"global_over_noise{ending}"] == pytest.approx(WORKERS * local / scale, rel=0.05)


@pytest.mark.parametrize("kind", [["workers.batched=true"], ["training.gradient_accumulation=2"]])
def test_averaged_gradients_of_a_regression(kind: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.noise_scale.LENGTH", 1000)
    config, workers, meter = prepared("parallel=allreduce", "optimizer=adam", "training.batch_size=256", *kind)
    backward = backward_of(Regression(), workers, config, CPU)
    for step in range(1, 401):
        with meter.of_update(step):
            backward()
        for worker in workers:
            worker.optimizer.zero_grad()
            worker.model._cohort.synchronized = False
    check(meter.row(meter.sums.flatten().tolist()), 64)


@pytest.mark.parametrize("optimizer", ["adam", "accumadam"])
def test_gradients_at_the_mean_weights_of_a_regression(optimizer: str) -> None:
    _, workers, meter = prepared(f"optimizer={optimizer}", "training.batch_size=64")
    for worker in workers:
        worker.model.module.weight.data += worker.index - (WORKERS - 1) / 2
    with workers[0].model.averaged() as mean_model, torch.no_grad():
        row = meter.after_evaluation(mean_model, 5000)
    check(row, 16)
    assert workers[0].model.module.weight.grad is None


def test_no_second_moment_no_preconditioned_scale() -> None:
    _, workers, meter = prepared("optimizer=adam", "training.batch_size=64")
    workers[1].optimizer.state.clear()
    with workers[0].model.averaged() as mean_model:
        row = meter.after_evaluation(mean_model, 10)
        assert meter.after_evaluation(mean_model, 14) == {}  # the next pass is due in step 15
    assert list(row) == ["noise_scale", "local_over_noise", "global_over_noise"]


def test_smoothing_leaves_out_what_is_not_finite_and_ratios_are_those_of_means() -> None:
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for signal, noise in ((1.0, 40.0), (math.inf, 1.0), (-3.0, 20.0)):
        found = torch.stack(signal_and_noise(*torch.tensor([signal + noise / 4, signal + noise / 8]), 4, 8))
        sums = smoothed(sums, torch.stack([found, torch.full((2,), math.nan)]), LENGTH)
    weights = [math.exp(-1), 1]
    signal, noise = weights[0] - 3, 40 * weights[0] + 20
    row = noise_row(sums.tolist(), 2, 16)
    assert row["local_over_noise"] == pytest.approx(2 * signal / noise)
    assert row["global_over_noise"] == pytest.approx(16 * signal / noise)
    assert math.isnan(row["noise_scale"])  # the estimate of |G|^2 is negative
    assert len(row) == 3


@pytest.mark.parametrize("method", ["allreduce", "decentralized"])
def test_a_run_is_the_same_bit_for_bit_when_it_is_measured(method: str, tmp_path: Path) -> None:
    def run(every: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        folder = tmp_path / every
        arguments = [f"parallel={method}", "workers=simulated", "workers.count=4", "model.width=4", "training.steps=12"]
        arguments += ["evaluation.every=5", "logging.every=4", "logging.progress=false", "training.clip=1"]
        arguments += ["optimizer=accumadam", "optimizer.fused=false", f"logging.noise_scale_every={every}"]
        assert launch("cnn", [*arguments, f"run_dir={folder}"]) == 0
        return rows(folder), torch.load(folder / "checkpoints/step_00000012/rank_0.pt", weights_only=True)

    (plain, left), (measured, right) = run("null"), run("1")
    assert sum("noise_scale" in row for row in measured) == {"allreduce": 3, "decentralized": 2}[method]
    assert [{key: value for key, value in row.items() if "noise" not in key} for row in measured] == plain
    for one, other in zip(*map(tree_leaves, (left["workers"], right["workers"])), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_checkpoint_from_before_it_was_measured_is_loaded() -> None:
    config, workers, _ = prepared("optimizer=adam", "training.batch_size=64")
    recorder = Recorder(config, Regression(), None)
    recorder.begin(workers, 10, config)
    state = recorder.state_dict()
    recorder.load_state_dict({key: value for key, value in state.items() if key != "noise"})
    assert not recorder.noise.sums.any()


def test_whether_it_is_measured_is_no_part_of_what_a_run_computes() -> None:
    measured, plain = (compose_config("cnn", [f"logging.noise_scale_every={every}"]) for every in (10, "null"))
    assert fingerprint(measured) == fingerprint(plain)
