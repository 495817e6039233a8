"""Local steps in plain numpy, with no code of ours but `topology.matrix` and the cut into buckets, and by the engine.

The least squares of `test_matrix_form.py` in float64, by SGD with momentum and decay. The rows of X are the workers'
parameters, of A their anchors, of V their outer momenta; s is the position in a round of H updates:

    s = tau - 1   X += W A - A;  A = W A                         before the update, whose gradient was taken at X(t)
    s = H - 1     D = X - A;  V = mu V + D;  A += eta (D + mu V);  [tau = 0: A = W A];  X = A        after it
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from common.parallel import DataParallel, DecentralizedDataParallel, Mixing, Outer
from common.parallel.gossip.buckets import fragments_of, plan_buckets
from common.simulate import simulate
from common.topology import Topology, build
from tests.distributed.test_matrix_form import BETA, DECAY, FEATURES, LR, SAMPLES, problem, start

STEPS = 14
BUCKET_MB = 0.00015  # two or three buckets


@dataclass(frozen=True)
class Case:
    """options: arguments of the wrapper; decaying: whether the learning rate falls to 0 in a straight line."""

    topology: Topology
    options: dict[str, Any] = field(default_factory=dict)
    decaying: bool = False
    steps: int = STEPS


def in_numpy(n: int, case: Case) -> dict[str, np.ndarray]:
    """Return X, A and V after all steps, [n, FEATURES], of methods whose anchors are kept."""
    options = case.options
    outer, H, F = options.get("outer", Outer()), options.get("local_steps", 1), options.get("fragments", 1)
    tau, first = options["merge_after"], options.get("local_steps_from", 0)
    mixing = options.get("mixing", Mixing())
    X = np.tile(start(), (n, 1))
    A, V, M = X.copy(), np.zeros_like(X), np.zeros_like(X)
    rounds = [0] * F
    buckets = plan_buckets([torch.zeros(FEATURES).double()], case.topology, BUCKET_MB, "aligned", F)
    columns = [part.span for (part,) in fragments_of(buckets, F)]

    def mixed(Y: np.ndarray, f: int, t: int) -> np.ndarray:
        W = case.topology.matrix(rounds[f])
        rounds[f] += 1
        g = (1 - t / case.steps) ** mixing.power if case.decaying and t >= mixing.start else 1.0
        return (1 - g) * Y + g * W @ Y

    for t in range(case.steps):
        B, b = map(np.array, zip(*(problem(i, t) for i in range(n)), strict=True))
        G = 2 / SAMPLES * np.einsum("nsf,ns->nf", B, np.einsum("nsf,nf->ns", B, X) - b)
        last, due = (0, min(tau, 1)) if t < first else (H - 1, tau)
        at = [0 if t < first else (t - first + f * H // F) % H for f in range(F)]
        for f, c in enumerate(columns):
            if due and at[f] == due - 1:
                new = mixed(A[:, c], f, t)
                X[:, c] += new - A[:, c]
                A[:, c] = new
        M = BETA * M + G + DECAY * X
        X = X - LR * (1 - t / case.steps if case.decaying else 1.0) * M
        for f, c in enumerate(columns):
            if at[f] != last:
                continue
            if tau == 0 and outer.displacement == "mixed":
                X[:, c] = mixed(X[:, c], f, t)
            if t < first:
                A[:, c] = X[:, c]
            else:
                D = X[:, c] - A[:, c]
                V[:, c] = outer.momentum * V[:, c] + D
                A[:, c] += outer.lr * ((D + outer.momentum * V[:, c]) if outer.nesterov else V[:, c])
            if tau == 0 and outer.displacement == "own":
                A[:, c] = mixed(A[:, c], f, t)
            X[:, c] = A[:, c]
    return {"X": X, "A": A, "V": V}


def train(models: list[DataParallel], ranks: list[int], case: Case, steps: range) -> None:
    """Train the workers that live in this process."""
    for step in steps:
        for model, rank in zip(models, ranks, strict=True):
            B, b = map(torch.from_numpy, problem(rank, step))
            (model(B)[:, 0] - b).square().mean().backward()
        for model in models:
            model.optimizer.step()
            model.optimizer.zero_grad()
            model.schedule.step()


def equip(model: DataParallel, case: Case) -> DataParallel:
    """Attach the optimizer, and a schedule."""
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=LR, momentum=BETA, weight_decay=DECAY))
    factor = (lambda t: 1 - t / case.steps) if case.decaying else (lambda t: 1.0)
    model.__dict__["optimizer"] = optimizer
    model.__dict__["schedule"] = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return model


def module() -> nn.Linear:
    linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    linear.weight.data[0] = torch.from_numpy(start())
    return linear


def real(case: Case, **more: Any) -> DecentralizedDataParallel:
    """Return this rank's worker."""
    options = {"bucket_mb": BUCKET_MB, "timeout_s": 30} | case.options | more
    return equip(DecentralizedDataParallel(module(), case.topology, **options), case)


def on_rank(rank: int, n: int, cases: list[Case]) -> list[list[np.ndarray]]:
    """Return this rank's parameters and communication state after all steps of each case."""
    results = []
    for case in cases:
        model = real(case)
        train([model], [rank], case, range(case.steps))
        results.append(vectors_of(model))
        model.close()
    return results


def in_simulation(n: int, case: Case) -> list[list[np.ndarray]]:
    """Return the same of simulated workers."""
    options = {"bucket_mb": BUCKET_MB} | case.options
    models = [equip(model, case) for model in simulate(module(), n, topology=case.topology, **options)]
    train(models, list(range(n)), case, range(case.steps))
    return [vectors_of(model) for model in models]


def vectors_of(model: DataParallel) -> list[np.ndarray]:
    kept = [tensor for name, tensor in model.communication_state().items() if not name.startswith("layout")]
    return [tensor.detach().numpy().ravel().copy() for tensor in (model.module.weight, *kept)]


DEFAULT = Outer(lr=0.4, momentum=0.9)
METHODS: dict[str, dict[str, Any]] = {
    "local SGD": {"local_steps": 3, "merge_after": 0},
    "local SGD, one step late": {"local_steps": 3, "merge_after": 1},
    "local SGD, late": {"local_steps": 3, "merge_after": 2},
    "post-local SGD": {"local_steps": 3, "merge_after": 0, "local_steps_from": 5},
    "post-local, late": {"local_steps": 4, "merge_after": 2, "local_steps_from": 5, "outer": DEFAULT},
    "DiLoCo": {"local_steps": 4, "merge_after": 0, "outer": Outer(lr=0.7, momentum=0.9)},
    "gossip, at once": {"local_steps": 4, "merge_after": 1, "outer": DEFAULT},
    "gossip": {"local_steps": 4, "merge_after": 2, "outer": DEFAULT},
    "gossip, a round late": {"local_steps": 4, "merge_after": 4, "outer": DEFAULT},
    "gossip, every update": {"local_steps": 1, "merge_after": 1, "outer": DEFAULT},
    "NoLoCo": {
        "local_steps": 4,
        "merge_after": 0,
        "outer": Outer(lr=0.7, momentum=0.5, nesterov=False, displacement="mixed"),
    },
    "streaming": {"local_steps": 4, "merge_after": 2, "outer": DEFAULT, "fragments": 2},
    "streaming, blocking": {"local_steps": 4, "merge_after": 0, "outer": DEFAULT, "fragments": 3},
    "streaming, post-local": {
        "local_steps": 5,
        "merge_after": 1,
        "local_steps_from": 3,
        "outer": DEFAULT,
        "fragments": 3,
    },
    "DSGD-AC": {"merge_after": 1, "mixing": Mixing(power=3, start=4)},
    "DSGD-AC, late": {"local_steps": 3, "merge_after": 2, "outer": DEFAULT, "mixing": Mixing(power=3)},
}


def cases(n: int, names: list[str], methods: list[str] | None = None) -> list[Case]:
    """Return these methods (default: all) on each of these topologies over n workers."""
    per_host = {"aer": 2 if n > 2 else 1}
    topologies = [build(name, n, per_host.get(name, 1)) for name in names]
    return [
        Case(topology, METHODS[method], decaying=method.startswith("DSGD-AC"))
        for topology in topologies
        for method in methods or METHODS
    ]
