"""Processes and simulator against the published matrix form in plain numpy, with no code of ours but
`topology.matrix`.

Worker i has its own least-squares loss |A x - b|^2 / m in float64, another A, b in each step. With the rows of X as
the workers' parameters and the gradient G(t) taken at X(t):

    awc      X(t+1) = W(t) X(t) + D(t)          atc      X(t+1) = W(t) (X(t) + D(t))

D(t) = -lr (G + c Y) for SGD with weight decay c, acting on Y = W X in awc, on Y = X in atc; with momentum,
M <- beta M + (G + c Y), D = -lr M; lr falls from step to step. DmSGD (atc) mixes the momentum too:

    dmsgd       M <- W (beta M + G + c X);  X <- W (X - lr M)
    qg_dmsgd    Y <- W (X - lr (beta M + G + c X));  M <- beta M + (1 - beta) (X - Y) / lr;  X <- Y

All-reduce takes the mean of the gradients instead of W.

Push-sum: W(t) need not have rows that sum to 1; w(t+1) = W(t) w(t), w(0) = 1, and gradients are taken at Z = X / w.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import DmSGD, QGDmSGD
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel
from common.simulate import simulate
from common.topology import Round, Topology, build
from tests.distributed.processes import run_processes

LR, BETA, DECAY, STEPS, SAMPLES, FEATURES = 0.05, 0.9, 0.02, 20, 6, 40
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=DECAY),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "dmsgd": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "dmsgd_local": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY, momentum_mixing=False),
    "qg_dmsgd": lambda p: QGDmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
}


@dataclass(frozen=True)
class Case:
    """order: "awc", "atc", or "allreduce"."""

    topology: Topology
    order: str
    optimizer: str
    push_sum: bool = False


def problem(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([worker, step])
    return rng.normal(size=(SAMPLES, FEATURES)), rng.normal(size=SAMPLES)


def start() -> np.ndarray:
    return np.random.default_rng(99).normal(size=FEATURES)


def learning_rate(step: int) -> float:
    """In terms of LR."""
    return 1 - step / (2 * STEPS)


def train(models: Sequence[DataParallel], ranks: Sequence[int], case: Case) -> None:
    """Make all steps of the workers in this process."""
    optimizers = [model.attach(OPTIMIZERS[case.optimizer](model.parameters())) for model in models]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate) for optimizer in optimizers]
    for step in range(STEPS):
        for model, rank in zip(models, ranks, strict=True):
            A, b = map(torch.from_numpy, problem(rank, step))
            (model(A)[:, 0] - b).square().mean().backward()
        for model in models:
            model.synchronize_gradients()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def module(rank: int = 0) -> nn.Linear:
    linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    linear.weight.data[0] = torch.from_numpy(start() if rank == 0 else np.full(FEATURES, np.nan))
    return linear


def outcome(model: DataParallel) -> tuple[np.ndarray, np.ndarray, float]:
    """Return a worker's parameters, the mean of all, and the consensus distance."""
    with model.averaged():
        mean = model.module.weight.detach()[0].numpy().copy()
    return model.module.weight.detach()[0].numpy().copy(), mean, model.consensus_distance()


def on_rank(rank: int, n: int, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return the outcome of this rank's worker after all steps of each case."""
    results = []
    for case in cases:
        if case.order == "allreduce":
            model: DataParallel = AllReduceDataParallel(module(rank), timeout_s=30)
        else:
            options = {"bucket_mb": 0.00015, "timeout_s": 30, "push_sum": case.push_sum}
            model = DecentralizedDataParallel(module(rank), case.topology, case.order, **options)
        train([model], [rank], case)
        results.append(outcome(model))
        model.close()
    return results


def in_simulation(n: int, case: Case) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return the same of simulated workers."""
    if case.order == "allreduce":
        models = simulate(module(), n, "allreduce")
    else:
        models = simulate(module(), n, topology=case.topology, order=case.order, push_sum=case.push_sum)
    train(models, range(n), case)
    return [outcome(model) for model in models]


def in_numpy(n: int, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return X [n, FEATURES] and the weights w [n] of push-sum after all steps."""
    X, M, w = np.tile(start(), (n, 1)), np.zeros((n, FEATURES)), np.ones(n)
    beta = 0.0 if case.optimizer == "sgd" else BETA
    for t in range(STEPS):
        W, lr = case.topology.matrix(t), LR * learning_rate(t)
        A, b = map(np.array, zip(*(problem(i, t) for i in range(n)), strict=True))
        Z = X / w[:, None]
        G = 2 / SAMPLES * np.einsum("nsf,ns->nf", A, np.einsum("nsf,nf->ns", A, Z) - b)
        if case.order == "awc":
            X, w = W @ X, W @ w
            M = beta * M + G + DECAY * X / w[:, None]
            X = X - lr * M
        elif case.order == "allreduce":
            M = beta * M + G.mean(0) + DECAY * X
            X = X - lr * M
        elif case.optimizer == "qg_dmsgd":
            Y = W @ (X - lr * (beta * M + G + DECAY * X))
            X, M = Y, beta * M + (1 - beta) * (X - Y) / lr
        else:
            M = beta * M + G + DECAY * Z
            if case.optimizer == "dmsgd":
                M = W @ M
            X, w = W @ (X - lr * M), W @ w
    return X, w


def assert_same(n: int, cases: list[Case]) -> None:
    """Check processes and simulator: parameters, the mean, and the distance from it."""
    results = run_processes(on_rank, n, cases)
    for index, case in enumerate(cases):
        X, w = in_numpy(n, case)
        Z, mean = X / w[:, None], X.mean(axis=0)
        assert (abs(w - 1).max() > 0.1) == case.push_sum
        for where, workers in {"processes": [r[index] for r in results], "simulator": in_simulation(n, case)}.items():
            name = f"{where}: {case.topology.name} {case.order} {case.optimizer}"
            for rank, (x, x_bar, distance) in enumerate(workers):
                np.testing.assert_allclose(x, Z[rank], rtol=1e-10, atol=1e-12, err_msg=name)
                np.testing.assert_allclose(x_bar, mean, rtol=1e-10, atol=1e-12, err_msg=name)
                assert distance == pytest.approx(np.sqrt(((Z - mean) ** 2).sum(axis=1).mean()), rel=1e-9, abs=1e-12)


SCHEDULES: dict[int, list[dict]] = {
    5: [
        {"name": "one_peer_exponential"},
        {"name": "random_matching", "seed": 3},
        {"name": "base_k"},
        {"name": "ring", "idle_rounds": 2},
        {"name": "star"},
        {"name": "grid"},
    ],
    8: [
        {"name": "one_peer_exponential"},
        {"name": "aer", "workers_per_host": 2},
        {"name": "base_k", "idle_rounds": 1},
        {"name": "torus"},
        {"name": "hypercube"},
        {"name": "static_exponential"},
    ],
}


def topologies(n: int, folder: Path) -> list[Topology]:
    """Return those above, and a directed cycle with unequal weights from a file."""
    edges = folder / "edges.txt"
    edges.write_text("\n".join(f"{i} {(i + 1) % n} 0.3" for i in range(n)))
    cycle = build("file", n, path=edges, directed=True, weights="explicit")
    return [build(world_size=n, **options) for options in SCHEDULES[n]] + [cycle]


METHODS = [("awc", "sgd"), ("awc", "momentum"), ("atc", "sgd"), ("atc", "momentum"), ("atc", "dmsgd")]
METHODS += [("atc", "dmsgd_local"), ("atc", "qg_dmsgd")]


@pytest.mark.parametrize("n", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_matrix_form(n: int, tmp_path: Path) -> None:
    """Each topology with one method of each order."""
    cases = [Case(build("complete", n), "allreduce", "momentum")]
    for number, topology in enumerate(topologies(n, tmp_path)):
        cases += [Case(topology, *METHODS[number % 2]), Case(topology, *METHODS[2 + (number + n) % 5])]
    assert_same(n, cases)


def directed(n: int, period: int) -> Topology:
    """Return a topology with a random directed graph in each round; columns sum to 1, rows do not."""
    rng = np.random.default_rng(n)
    rounds = []
    for _ in range(period):
        W = np.eye(n) + (rng.random((n, n)) < 0.4) * rng.random((n, n))
        rounds.append(Round.from_matrix(W / W.sum(axis=0)))
    return Topology("directed", n, schedule=tuple(rounds))


@pytest.mark.parametrize("n", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_push_sum(n: int) -> None:
    graphs = [directed(n, 1), directed(n, 3)]
    methods = [("awc", "sgd"), ("awc", "momentum"), ("atc", "momentum"), ("atc", "dmsgd_local")]
    assert_same(n, [Case(graph, *method, push_sum=True) for graph in graphs for method in methods])


def test_push_sum_changes_nothing_where_the_mean_is_kept() -> None:
    cases = [Case(build("one_peer_exponential", 4), "awc", "momentum", push_sum) for push_sum in (False, True)]
    for without, with_ in run_processes(on_rank, 4, cases):
        np.testing.assert_array_equal(with_[0], without[0])
