"""Compare both papers' convergence theorems with regression problems whose noise is known.

python -m scripts.benchmarks.theorems               results/benchmarks/theorems_{quadratic,logistic}.{csv,md}

The error after T steps is the theorems' measure, the mean over t < T of E ||grad f(mean_i x_i(t))||^2, with the
constant learning rate that makes it smallest for this T: every method is tuned the same way, at every T.

Quadratic (arXiv 2110.13363): worker i has f_i(x) = h_i (x - b_i)^2 / 2 with h_i and b_i drawn for it, and gradients
have unit Gaussian noise. DmSGD is then linear and its second moments follow exactly, without sampling (`mean_errors`).
Logistic (arXiv 2410.11998): decentralized Adam and accumulated Adam under overlap, x_i <- sum_j w_ij x_j + d_i, on
logistic regression with mini-batches; means over seeds.

Predicted before the first full run, checked by `conclude_*`: on quadratics both exponential graphs keep at least 0.9 of
parallel SGD's speed-up at every n, powers of two or not, and the ring's transient is at least 10 times theirs from 16
workers on; on logistic regression DAdam's steps on the exponential graphs and AER are within 10 % of those on the
complete graph, and the error falls at least as T^-0.45.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor
from tqdm import tqdm

from common.cli import Arguments, Text, command_of, main_function, parse
from common.optim.functional import Hyper, update_one
from common.topology import build
from scripts.benchmarks.record import Benchmark

MODULE = "scripts.benchmarks.theorems"
Array = NDArray[np.float64]
MOMENTUM = 0.9  # of DmSGD
BATCH, FEATURES, SAMPLES = 4, 16, 192 * 16  # per worker; of logistic regression; in total
EVERY = 4  # steps between evaluations on all samples
NEAR = 1.25  # a transient is over when the error stays below this multiple of parallel SGD's
QUADRATIC = {
    "topology": "complete: parallel SGD",
    "workers": "n",
    "exact_after": "rounds after which averaging is exact; empty: never",
    "speedup": "steps that one worker needs to reach `epsilon`, over those that n workers need",
    "relative_speedup": "of it to parallel SGD's with as many workers",
    "transient": f"steps until the error stays below {NEAR} times parallel SGD's",
    "worst_ratio": "largest ratio of the error to parallel SGD's, at any T",
}
LOGISTIC = {
    "method": "Adam: gradients averaged by all-reduce; DAdam: decentralized; AccumAdam: decentralized, accumulated",
    "topology": "of gossip",
    "workers": "n",
    "accumulation_steps": "s",
    "steps": "to reach `epsilon`",
    "speedup": "steps of one worker (Adam) / steps",
    "relative_speedup": "of it to Adam's by all-reduce with as many workers",
    "slope": "of log error against log T over the last factor 4 of T; -0.5 is the theorems' 1/sqrt(T)",
}
GOSSIP = ("complete", "ring", "static_exponential", "one_peer_exponential", "aer")
PER_HOST = 2  # workers on a host of the alternating exponential ring


class TheoremArguments(Arguments):
    """Command line of scripts.benchmarks.theorems."""

    workers: Text = Field("1,2,4,6,8,12,16,32,64", pattern=r"^1(,\d+)+$", description="numbers of workers, 1 first")
    problems: PositiveInt = Field(8, description="draws of the quadratic problem")
    seeds: PositiveInt = Field(8, description="seeds of the logistic problem's mini-batches")
    steps: PositiveInt = Field(8192, ge=256, description="steps of logistic regression")
    heterogeneity: float = Field(10.0, ge=0, description="standard deviation of the workers' optima b_i")
    epsilon_quadratic: float = Field(3e-3, gt=0, description="error to reach")
    epsilon_logistic: float = Field(1e-3, gt=0, description="error to reach")
    output: Text = Field("results/benchmarks", description="folder for the tables")


@main_function
def main(argv: Sequence[str]) -> int:
    """Compute both tables and write them."""
    arguments = parse(TheoremArguments, argv, MODULE, "Compare the convergence theorems with problems of known noise.")
    torch.set_num_threads(1)
    workers = [int(n) for n in arguments.workers.split(",")]
    for name, columns, rows, conclude, title in (
        ("theorems_quadratic", QUADRATIC, quadratic_rows, conclude_quadratic, "DmSGD on quadratics, computed exactly"),
        ("theorems_logistic", LOGISTIC, logistic_rows, conclude_logistic, "Decentralized Adam on logistic regression"),
    ):
        formats = {column: ",.0f" if column in ("steps", "transient") else ".3g" for column in columns}
        benchmark = Benchmark(name, title, columns, formats)
        table = list(tqdm(rows(workers, arguments), desc=name, disable=None))
        found = conclude(pd.DataFrame(table))
        benchmark.write(table, found, arguments.output, command_of(MODULE, arguments), "1 core used")
    return 0


def conclude_quadratic(table: pd.DataFrame) -> list[str]:
    """Return how the predictions fared."""
    exponential = table[table.topology.isin(["static_exponential", "one_peer_exponential"])]
    lowest = exponential.loc[exponential.relative_speedup.idxmin()]
    ring = table[(table.topology == "ring") & (table.workers >= 16)]
    longest = exponential[exponential.workers >= 16].groupby("workers").transient.max()
    ratios = {n: steps / longest[n] for n, steps in zip(ring.workers, ring.transient, strict=True)}
    return [
        f"Predicted: exponential graphs keep at least 0.9 of parallel SGD's speed-up. Computed: at least "
        f"{lowest.relative_speedup:.3g} ({lowest.topology}, {lowest.workers} workers).",
        "Predicted: the ring's transient is at least 10 times theirs from 16 workers on. Computed: "
        + "; ".join(
            f"{n} workers: {f'{r:.3g} times' if r == r else 'not over after the last T'}" for n, r in ratios.items()
        )
        + ".",
    ]


def conclude_logistic(table: pd.DataFrame) -> list[str]:
    """Return how the predictions fared."""
    dadam = table[table.method == "DAdam"].pivot(index="workers", columns="topology", values="steps")
    sparse = dadam.filter(items=["static_exponential", "one_peer_exponential", "aer"])  # not all exist for 2
    ratios = sparse.div(dadam["complete"], axis=0).stack()
    flattest = table.slope.max()
    return [
        "Predicted: DAdam's steps on exponential graphs and AER are within 10 % of those on the complete graph. "
        f"Measured: {ratios.min():.3g} to {ratios.max():.3g} times them.",
        f"Predicted: the error falls at least as T^-0.45. Measured: its slope is at most {flattest:.3g}.",
    ]


# --- errors as functions of T -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """The smallest error over the learning rates at each number of steps, both 1-D and of one length."""

    steps: Array
    values: Array

    def at(self, steps: Array) -> Array:
        """Return the errors at other numbers of steps, interpolated in logarithms."""
        return np.exp(np.interp(np.log(steps), np.log(self.steps), np.log(self.values)))

    def reach(self, epsilon: float) -> float:
        """Return the steps after which the error is `epsilon` and stays below; NaN if it does not get there."""
        above = np.flatnonzero(self.values > epsilon)
        if not len(above) or above[-1] + 1 == len(self.steps):
            return float("nan")
        around = slice(above[-1], above[-1] + 2)
        logs = np.log(self.values[around])[::-1], np.log(self.steps[around])[::-1]
        return float(np.exp(np.interp(np.log(epsilon), *logs)))


def transient(ours: Errors, parallel: Errors) -> tuple[float, float]:
    """Return the steps until `ours` stays below `NEAR` times `parallel`, and the largest ratio of the two."""
    inside = ours.steps[(ours.steps >= parallel.steps[0]) & (ours.steps <= parallel.steps[-1])]
    ratio = ours.at(inside) / parallel.at(inside)
    above = np.flatnonzero(ratio > NEAR)
    over = inside[0] if not len(above) else inside[above[-1] + 1] if above[-1] + 1 < len(inside) else np.nan
    return float(over), float(ratio.max())


def topologies(n: int) -> list[str]:
    """Return the topologies that exist for n workers."""
    hosts = n // PER_HOST
    return [name for name in GOSSIP if name != "aer" or (n % PER_HOST == 0 and hosts > 1 and not hosts & (hosts - 1))]


def matrices_of(name: str, n: int) -> list[Array]:
    """Return the mixing matrices of one period."""
    topology = build(name, n, workers_per_host=PER_HOST if name == "aer" else 1)
    return [topology.matrix(t) for t in range(topology.period or 1)]


# --- quadratics -------------------------------------------------------------------------------------------------------


def quadratic_rows(workers: Sequence[int], arguments: TheoremArguments) -> Iterator[dict[str, object]]:
    """Yield a row for each number of workers and topology."""
    one = quadratic_errors("complete", 1, arguments).reach(arguments.epsilon_quadratic)
    for n in (n for n in workers if n > 1):
        parallel = quadratic_errors("complete", n, arguments)
        for name in topologies(n):
            errors = quadratic_errors(name, n, arguments)
            steps, worst = transient(errors, parallel)
            speedup = one / errors.reach(arguments.epsilon_quadratic)
            relative = speedup / (one / parallel.reach(arguments.epsilon_quadratic))
            measured = {"speedup": speedup, "relative_speedup": relative, "transient": steps, "worst_ratio": worst}
            yield {"topology": name, "workers": n, "exact_after": exact_after(name, n)} | measured


def exact_after(name: str, n: int) -> int | None:
    """Return after how many rounds averaging is exact, or None."""
    product = np.linalg.multi_dot([np.eye(n), *matrices_of(name, n)])
    return len(matrices_of(name, n)) if np.abs(product - 1 / n).max() < 1e-12 else None


@cache
def quadratic_errors(name: str, n: int, arguments: TheoremArguments) -> Errors:
    """Return the errors of DmSGD on a topology of n workers, averaged over the problems."""
    matrices = matrices_of(name, n)
    draw = np.random.default_rng([n, 1])
    h = np.exp(draw.normal(0, 0.5, (arguments.problems, n)))
    h /= h.mean(axis=1, keepdims=True)
    b = draw.normal(0, arguments.heterogeneity, (arguments.problems, n))
    pull = h * ((h * b).mean(axis=1, keepdims=True) - b)  # gradients of the f_i at the optimum of f
    rates = (1 - MOMENTUM) * 2.0 ** np.arange(-16, 2, 0.5)
    curves = np.array([mean_errors(matrices, h, pull, rate) for rate in rates])
    errors = np.where(np.isfinite(curves), curves, np.inf).min(axis=0)
    return Errors(len(matrices) * 2.0 ** np.arange(len(errors)), errors)


def mean_errors(matrices: Sequence[Array], h: Array, pull: Array, rate: float, doublings: int = 20) -> Array:
    """Return the mean over t < T of E (mean_i x_i(t))^2 of DmSGD, for T = 1, 2, 4, ... periods; exact.

    DmSGD is m <- W (beta m + h x + pull + noise), then x <- W (x - rate m), with x measured from the optimum. A period,
    over all matrices W, is a linear map of z = (x_1..x_n, m_1..m_n, 1). Arrays have a leading dimension of problems:
    h and pull [problems, n], and over a period

    step:   [2n + 1, 2n + 1]; z <- step z + noise
    noise:  [2n + 1, 2n + 1], covariance of the noise
    weight: [2n + 1, 2n + 1]; the sum of (mean_i x_i)^2 is z' weight z + extra for z at its start
    extra:  the part that the period's own noise adds on average

    Errors that overflow are infinite or NaN.
    """
    problems, n = h.shape
    mean = np.repeat([1 / n, 0], [n, n + 1])
    step = np.broadcast_to(np.eye(2 * n + 1), (problems, 2 * n + 1, 2 * n + 1))
    noise, weight, extra = np.zeros_like(step), np.zeros_like(step), np.zeros(problems)
    for w in matrices:
        seen = mean @ step
        weight = weight + seen[:, :, None] * seen[:, None, :]
        extra = extra + mean @ noise @ mean
        one = np.zeros_like(step)
        one[:, n:-1, :n] = w * h[:, None, :]
        one[:, n:-1, n:-1] = MOMENTUM * w
        one[:, n:-1, -1] = pull @ w.T
        one[:, :n] = -rate * (w @ one[:, n:-1])
        one[:, :n, :n] += w
        one[:, -1, -1] = 1
        injected = np.concatenate([-rate * w @ w, w, np.zeros((1, n))])
        step, noise = one @ step, one @ noise @ one.mT + injected @ injected.T
    # With S(k) the sum of E z z' at the starts of k periods, S(2k) = S(k) + A S(k) A' + k F, where A maps k periods and
    # F is the covariance of the noise that they add.
    start = np.concatenate([np.ones(n), np.zeros(n), [1]])
    power, added, total = step, noise, np.broadcast_to(np.outer(start, start), step.shape)
    errors = []
    with np.errstate(over="ignore", invalid="ignore"):
        for periods in 2 ** np.arange(doublings):
            sums = (weight * total).sum(axis=(1, 2)) + periods * extra
            errors.append(sums.mean() / (periods * len(matrices)))
            total = total + power @ total @ power.mT + periods * added
            added = added + power @ added @ power.mT
            power = power @ power
    return np.array(errors)


# --- logistic regression ----------------------------------------------------------------------------------------------


def logistic_rows(workers: Sequence[int], arguments: TheoremArguments) -> Iterator[dict[str, object]]:
    """Yield a row for each number of workers and method."""
    epsilon = arguments.epsilon_logistic
    one = logistic_errors("complete", 1, 1, False, arguments).reach(epsilon)
    for n in (n for n in workers if n > 1):
        reference = logistic_errors("complete", n, 1, True, arguments).reach(epsilon)
        for method, name, s in methods(n):
            errors = logistic_errors(name, n, s, method == "Adam", arguments)
            steps = errors.reach(epsilon)
            last = errors.steps >= errors.steps[-1] / 4
            slope = np.polyfit(np.log(errors.steps[last]), np.log(errors.values[last]), 1)[0]
            row = {"method": method, "topology": name, "workers": n, "accumulation_steps": s, "steps": steps}
            yield row | {"speedup": one / steps, "relative_speedup": reference / steps, "slope": slope}


def methods(n: int) -> Iterator[tuple[str, str, int]]:
    """Yield (method, topology, accumulation_steps) of the rows with n workers."""
    yield "Adam", "complete", 1
    for name in topologies(n):
        yield "DAdam", name, 1
    yield "AccumAdam", "one_peer_exponential", max(2, n // 2)


@cache
def logistic_errors(name: str, n: int, s: int, averages: bool, arguments: TheoremArguments) -> Errors:
    """Return the errors of (accumulated) Adam; gradients are averaged, or parameters mixed while they are computed."""
    features, labels = logistic_data()
    shards = torch.arange(len(features)).reshape(n, -1)
    matrices = [torch.as_tensor(w) for w in matrices_of(name, n)]
    rates = 2.0 ** torch.arange(-12, -1).double()[:, None, None, None]
    draw = torch.Generator().manual_seed(n)
    x = torch.zeros(len(rates), arguments.seeds, n, features.shape[1], dtype=torch.float64)
    m, v, a = (torch.zeros_like(x) for _ in range(3))
    hyper = Hyper(lr=1, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0, decoupled=False, s=s)
    errors = torch.empty(arguments.steps // EVERY, len(rates), dtype=torch.float64)
    for t in range(len(errors) * EVERY):
        if t % EVERY == 0:
            errors[t // EVERY] = gradient(x.mean(dim=2), features, labels).square().sum(dim=-1).mean(dim=1)
        picked = torch.randint(shards.shape[1], (arguments.seeds, n, BATCH), generator=draw)
        rows = shards[torch.arange(n)[:, None], picked]
        g = gradient(x, features[rows], labels[rows])
        if averages:
            g = g.mean(dim=2, keepdim=True).expand_as(g)
        move = torch.zeros_like(x)
        update_one(move, g, m, v, a if s > 1 else None, k=t + 1, hyper=hyper)
        x = matrices[t % len(matrices)] @ x + rates * move
    means = errors.cumsum(dim=0) / torch.arange(1, len(errors) + 1)[:, None]
    marks = np.unique(np.geomspace(4, len(errors), 24).astype(int))
    return Errors(marks * float(EVERY), means.min(dim=1).values.numpy()[marks - 1])


def gradient(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient at x [..., d] of mean log(1 + exp(-y <a, x>)), features a [..., samples, d], labels y."""
    margins = labels * torch.einsum("...sd,...d->...s", features, x)
    return -torch.einsum("...s,...sd->...d", labels * torch.sigmoid(-margins), features) / labels.shape[-1]


@cache
def logistic_data() -> tuple[Tensor, Tensor]:
    """Return features [samples, d] of unequal scales and labels +-1 from a logistic model; the same for every n."""
    draw = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -1, FEATURES, dtype=torch.float64)
    features = torch.randn(SAMPLES, FEATURES, generator=draw, dtype=torch.float64) * scales
    truth = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
    positive = torch.rand(SAMPLES, generator=draw, dtype=torch.float64) < torch.sigmoid(features @ truth)
    return features, positive.double() * 2 - 1


if __name__ == "__main__":
    sys.exit(main())
