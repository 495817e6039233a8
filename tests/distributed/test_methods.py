"""The methods that arXiv 2110.13363 compares: processes and simulator against the equations, replayed in numpy.

Worker i has its own least-squares loss |A x - b|^2 / m in float64, another A, b in each micro-batch. With the rows of X
as the workers' parameters, the gradients G at X (mean of the micro-batches, clipped row by row, decay added) and each
step's own learning rate r:

    parallel_sgd   M <- beta M + mean(G);   X <- X - r M          (the same row for all)
    dsgd           X <- W (X - r G)
    dmsgd_local    M <- beta M + G;         X <- W (X - r M)      (vanilla DmSGD)
    dmsgd          M <- W (beta M + G);     X <- W (X - r M)
    qg_dmsgd       Y <- W (X - r (beta M + G));   M <- beta M + (1 - beta) (X - Y) / r;   X <- Y

Clipping acts on what the optimizer sees: on the mean gradient of parallel_sgd, on each worker's own otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import DmSGD, QGDmSGD, multistep_with_warmup
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel
from common.simulate import simulate
from common.topology import build
from tests.distributed.processes import run_processes

BETA, DECAY, LR, STEPS, MICRO, SAMPLES, FEATURES = 0.9, 0.02, 0.05, 8, 2, 6, 12
WARMUP, WARMUP_START, MILESTONE = 3, 0.25, 6
OPTIMIZERS = {
    "parallel_sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "dsgd": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=DECAY),
    "dmsgd_local": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY, momentum_mixing=False),
    "dmsgd": lambda p: DmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
    "qg_dmsgd": lambda p: QGDmSGD(p, lr=LR, momentum=BETA, weight_decay=DECAY),
}
GOSSIP = ("dsgd", "dmsgd_local", "dmsgd", "qg_dmsgd")
TOPOLOGIES = ("static_exponential", "one_peer_exponential", "ring")


@dataclass(frozen=True)
class Case:
    method: str
    topology: str
    clip: float | None = None


CLIP = 0.5  # smaller than nearly all gradients here
CASES = [Case("parallel_sgd", "complete"), Case("parallel_sgd", "complete", CLIP)]
CASES += [Case(*choice) for choice in product(GOSSIP, TOPOLOGIES)]
CASES += [Case(method, "one_peer_exponential", CLIP) for method in GOSSIP]


def problem(worker: int, step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([worker, step, micro])
    return rng.normal(size=(SAMPLES, FEATURES)), rng.normal(size=SAMPLES)


def start() -> np.ndarray:
    return np.random.default_rng(99).normal(size=FEATURES)


def module() -> nn.Linear:
    linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    linear.weight.data[0] = torch.from_numpy(start())
    return linear


def train(models: Sequence[DataParallel], workers: Sequence[int], case: Case) -> np.ndarray:
    """Return these workers' parameters after all steps, [len(workers), FEATURES]."""
    optimizers = [model.attach(OPTIMIZERS[case.method](model.parameters())) for model in models]
    schedules = [
        multistep_with_warmup(o, milestones=[MILESTONE], gamma=0.1, warmup_steps=WARMUP, warmup_start=WARMUP_START)
        for o in optimizers
    ]
    for step in range(STEPS):
        for model, worker in zip(models, workers, strict=True):
            for micro in range(MICRO):
                A, b = map(torch.from_numpy, problem(worker, step, micro))
                with model.no_sync() if micro < MICRO - 1 else torch.enable_grad():
                    ((model(A)[:, 0] - b).square().mean() / MICRO).backward()
        for model in models:
            model.synchronize_gradients()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return np.stack([next(model.parameters()).detach()[0].numpy().copy() for model in models])


def in_process(rank: int, n: int, cases: list[Case]) -> list[np.ndarray]:
    results = []
    for case in cases:
        if case.method == "parallel_sgd":
            model = AllReduceDataParallel(module(), timeout_s=30)
        else:
            model = DecentralizedDataParallel(module(), case.topology, "atc", bucket_mb=0.00005, timeout_s=30)
        results.append(train([model], [rank], case)[0])
        model.close()
    return results


def in_simulation(n: int, case: Case) -> np.ndarray:
    if case.method == "parallel_sgd":
        return train(simulate(module(), n, "allreduce"), range(n), case)
    return train(simulate(module(), n, topology=case.topology, order="atc"), range(n), case)


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return LR * (WARMUP_START + (1 - WARMUP_START) * step / WARMUP)
    return LR * (0.1 if step >= MILESTONE else 1.0)


def in_numpy(n: int, case: Case) -> np.ndarray:
    """Return X after all steps, [n, FEATURES]."""
    X, M = np.tile(start(), (n, 1)), np.zeros((n, FEATURES))
    topology = build(case.topology, n)
    for t in range(STEPS):
        G = np.zeros_like(X)
        for micro in range(MICRO):
            for i in range(n):
                A, b = problem(i, t, micro)
                G[i] += 2 / SAMPLES * A.T @ (A @ X[i] - b) / MICRO
        if case.method == "parallel_sgd":
            G[:] = G.mean(axis=0)
        if case.clip is not None:
            norms = np.linalg.norm(G, axis=1, keepdims=True)
            G *= np.minimum(1, case.clip / (norms + 1e-6))  # as torch does
        G += DECAY * X
        W, r = topology.matrix(t), learning_rate(t)
        match case.method:
            case "parallel_sgd":
                M = BETA * M + G
                X = X - r * M
            case "dsgd":
                X = W @ (X - r * G)
            case "dmsgd_local":
                M = BETA * M + G
                X = W @ (X - r * M)
            case "dmsgd":
                M = W @ (BETA * M + G)
                X = W @ (X - r * M)
            case "qg_dmsgd":
                Y = W @ (X - r * (BETA * M + G))
                M = BETA * M + (1 - BETA) * (X - Y) / r
                X = Y
    return X


@pytest.mark.parametrize("n", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_processes_and_simulator_compute_the_equations(n: int) -> None:
    results = run_processes(in_process, n, CASES)
    for index, case in enumerate(CASES):
        expected = in_numpy(n, case)
        real = np.stack([result[index] for result in results])
        for got, where in ((real, "processes"), (in_simulation(n, case), "simulator")):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12, err_msg=f"{where}: {case}")
