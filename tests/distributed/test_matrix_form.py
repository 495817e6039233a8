"""The engine against the published matrix form in plain numpy, with no code of ours but `topology.matrix`.

Worker i has its own least-squares loss |A x - b|^2 / m in float64, another A, b in each step. With the rows of X as
the workers' parameters and the gradient G(t) taken at X(t):

    awc      X(t+1) = W(t) X(t) + D(t)          atc      X(t+1) = W(t) (X(t) + D(t))

D(t) = -lr (G + c Y) for SGD with weight decay c, acting on Y = W X in awc, on Y = X in atc; with momentum,
M <- beta M + (G + c Y), D = -lr M. DmSGD (atc) mixes the momentum too: M <- W (beta M + G + c X); X <- W (X - lr M).

Push-sum: W(t) need not have rows that sum to 1; w(t+1) = W(t) w(t), w(0) = 1, and gradients are taken at Z = X / w.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import DmSGD
from common.parallel import DecentralizedDataParallel
from common.topology import Round, Topology, build
from tests.distributed.processes import run_processes

LR, BETA, DECAY, STEPS, SAMPLES, FEATURES = 0.05, 0.9, 0.02, 20, 6, 40
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=DECAY),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "dmsgd": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "dmsgd_local": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY, momentum_mixing=False),
}


@dataclass(frozen=True)
class Case:
    topology: Topology
    order: str
    optimizer: str
    push_sum: bool = False


def problem(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([worker, step])
    return rng.normal(size=(SAMPLES, FEATURES)), rng.normal(size=SAMPLES)


def start() -> np.ndarray:
    return np.random.default_rng(99).normal(size=FEATURES)


def on_rank(rank: int, n: int, cases: list[Case]) -> list[np.ndarray]:
    """Return this rank's parameters after all steps of each case."""
    results = []
    for module, model in trained(rank, cases):
        results.append(module.weight.detach()[0].numpy().copy())
        model.close()
    return results


def trained(rank: int, cases: list[Case]) -> Iterator[tuple[nn.Linear, DecentralizedDataParallel]]:
    """Yield module and wrapper after all steps of each case."""
    for case in cases:
        module = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        module.weight.data[0] = torch.from_numpy(start() if rank == 0 else np.full(FEATURES, np.nan))
        options = {"bucket_mb": 0.00015, "timeout_s": 30, "push_sum": case.push_sum}
        model = DecentralizedDataParallel(module, case.topology, case.order, **options)
        optimizer = model.attach(OPTIMIZERS[case.optimizer](model.parameters()))
        for step in range(STEPS):
            A, b = map(torch.from_numpy, problem(rank, step))
            (model(A)[:, 0] - b).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield module, model


def in_numpy(n: int, case: Case) -> np.ndarray:
    """Return X after all steps, [n, FEATURES]."""
    X, M = np.tile(start(), (n, 1)), np.zeros((n, FEATURES))
    beta = 0.0 if case.optimizer == "sgd" else BETA
    for t in range(STEPS):
        W = case.topology.matrix(t)
        A, b = map(np.array, zip(*(problem(i, t) for i in range(n)), strict=True))
        residual = np.einsum("nsf,nf->ns", A, X) - b
        G = 2 / SAMPLES * np.einsum("nsf,ns->nf", A, residual)
        if case.order == "awc":
            X = W @ X
            M = beta * M + G + DECAY * X
            X = X - LR * M
        else:
            M = beta * M + G + DECAY * X
            if case.optimizer == "dmsgd":
                M = W @ M
            X = W @ (X - LR * M)
    return X


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
        {"name": "ring"},
        {"name": "torus"},
        {"name": "grid"},
    ],
}


def topologies(n: int, folder: Path) -> list[Topology]:
    """Return those above, and a directed cycle with unequal weights from a file."""
    edges = folder / "edges.txt"
    edges.write_text("\n".join(f"{i} {(i + 1) % n} 0.3" for i in range(n)))
    cycle = build("file", n, path=edges, directed=True, weights="explicit")
    return [build(world_size=n, **options) for options in SCHEDULES[n]] + [cycle]


METHODS = [
    ("awc", "sgd"),
    ("awc", "momentum"),
    ("atc", "sgd"),
    ("atc", "momentum"),
    ("atc", "dmsgd"),
    ("atc", "dmsgd_local"),
]


@pytest.mark.parametrize(("n", "methods"), [(5, METHODS[1::3]), pytest.param(8, METHODS[::2], marks=pytest.mark.slow)])
def test_processes_compute_the_matrix_form(n: int, methods: list[tuple[str, str]], tmp_path: Path) -> None:
    cases = [Case(topology, *method) for topology in topologies(n, tmp_path) for method in methods]
    results = run_processes(on_rank, n, cases)
    for index, case in enumerate(cases):
        got = np.array([result[index] for result in results])
        name = f"{case.topology.name} {case.order} {case.optimizer}"
        np.testing.assert_allclose(got, in_numpy(n, case), rtol=1e-11, atol=1e-13, err_msg=name)


def directed(n: int, period: int) -> Topology:
    """Return a topology with a random directed graph in each round; columns sum to 1, rows do not."""
    rng = np.random.default_rng(n)
    rounds = []
    for _ in range(period):
        W = np.eye(n) + (rng.random((n, n)) < 0.4) * rng.random((n, n))
        rounds.append(Round.from_matrix(W / W.sum(axis=0)))
    return Topology("directed", n, schedule=tuple(rounds))


def push_sum_in_numpy(n: int, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return X and w after all steps."""
    X, M, w = np.tile(start(), (n, 1)), np.zeros((n, FEATURES)), np.ones(n)
    beta = 0.0 if case.optimizer == "sgd" else BETA
    for t in range(STEPS):
        W = case.topology.matrix(t)
        A, b = map(np.array, zip(*(problem(i, t) for i in range(n)), strict=True))
        Z = X / w[:, None]
        G = 2 / SAMPLES * np.einsum("nsf,ns->nf", A, np.einsum("nsf,nf->ns", A, Z) - b)
        if case.order == "awc":
            X, w = W @ X, W @ w
            M = beta * M + G + DECAY * X / w[:, None]
            X = X - LR * M
        else:
            M = beta * M + G + DECAY * Z
            X, w = W @ (X - LR * M), W @ w
    return X, w


def pushing(rank: int, n: int, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return this rank's z, the mean model and the consensus distance after all steps of each case."""
    results = []
    for module, model in trained(rank, cases):
        with model.averaged():
            mean = module.weight.detach()[0].numpy().copy()
        results.append((module.weight.detach()[0].numpy().copy(), mean, model.consensus_distance()))
        model.close()
    return results


@pytest.mark.parametrize("n", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_push_sum_computes_the_matrix_form(n: int) -> None:
    graphs = [directed(n, 1), directed(n, 3)]
    methods = [("awc", "sgd"), ("awc", "momentum"), ("atc", "momentum"), ("atc", "dmsgd_local")]
    cases = [Case(graph, *method, push_sum=True) for graph in graphs for method in methods]
    results = run_processes(pushing, n, cases)
    for index, case in enumerate(cases):
        X, w = push_sum_in_numpy(n, case)
        assert abs(w - 1).max() > 0.1
        Z, mean = X / w[:, None], X.mean(axis=0)
        for rank in range(n):
            z, x_bar, distance = results[rank][index]
            np.testing.assert_allclose(z, Z[rank], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(x_bar, mean, rtol=1e-10, atol=1e-12)
            assert distance == pytest.approx(np.sqrt(((Z - mean) ** 2).sum(axis=1).mean()))


def test_push_sum_changes_nothing_where_the_mean_is_kept() -> None:
    cases = [Case(build("one_peer_exponential", 4), "awc", "momentum", push_sum) for push_sum in (False, True)]
    for without, with_ in run_processes(on_rank, 4, cases):
        np.testing.assert_array_equal(with_, without)
