"""The learning rate at the bottom of a parabola in log lr, through the trials of all tuning seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

LEVEL = 0.95


@dataclass(frozen=True)
class Optimum:
    """The best rate by a parabola, and how well the trials determine it.

    rate:      where the parabola is best, rounded to three digits
    low, high: its 95 % interval by Fieller's theorem, never beyond the rates that were tried; from the seeds' scatter
               or from what the parabola misses of the means, whichever is larger
    value:     what the parabola says of this rate, mean over seeds
    scatter:   residual standard deviation of a trial, without what a seed does to all its trials
    parabola:  its coefficients in log lr, the highest power first
    span:      the lowest and the highest rate that it was fitted to
    """

    rate: float
    low: float
    high: float
    value: float
    scatter: float
    parabola: tuple[float, float, float]
    span: tuple[float, float]


def fit_optimum(
    rates: Sequence[float], values: Sequence[Sequence[float]], highest: bool, tried: Sequence[float]
) -> Optimum | None:
    """Fit a parabola by least squares, with a separate level for each seed.

    rates:   at least three, ascending
    values:  [rates, seeds], finite
    highest: whether the highest value is best, else the lowest
    tried:   all rates of the grid

    Return None if the parabola has no optimum among `rates`: it is flat, bent the other way, or best beyond them.
    """
    y, x = np.asarray(values, float), np.log(rates)
    middle = x.mean()  # coefficients and their covariances in x - middle, where they are well conditioned
    design = np.vander(x - middle, 3)
    (c, b, a), *_ = np.linalg.lstsq(design, y.mean(axis=1))
    flat = 1e-9 * np.abs(y).max()
    bottom = -b / (2 * c) if (-c if highest else c) > flat else math.inf
    if not x[0] <= bottom + middle <= x[-1]:
        return None
    fitted, means = design @ (c, b, a), y.mean(axis=1)
    residuals = y - y.mean(axis=0) - (fitted - y.mean())[:, None]
    freedom, points = y.size - y.shape[1] - 2, len(x)
    variance = float((residuals**2).sum() / freedom)
    of_means = variance / y.shape[1]
    if points > 3 and (misfit := float(((fitted - means) ** 2).sum() / (points - 3))) > of_means:
        of_means, freedom = misfit, points - 3  # the means are no parabola: more seeds would not tell its bottom better
    covariance = np.linalg.inv(design.T @ design) * of_means
    low, high = _fieller(b, c, covariance[:2, :2], float(t.ppf((1 + LEVEL) / 2, freedom)))
    return Optimum(
        rate=float(f"{math.exp(bottom + middle):.3g}"),
        low=max(math.exp(min(low + middle, 700.0)), min(tried)),
        high=min(math.exp(min(high + middle, 700.0)), max(tried)),
        value=float(a + b * bottom + c * bottom**2),
        scatter=math.sqrt(variance),
        parabola=(float(c), float(b - 2 * c * middle), float(a - b * middle + c * middle**2)),
        span=(rates[0], rates[-1]),
    )


def _fieller(b: float, c: float, covariance: np.ndarray, quantile: float) -> tuple[float, float]:
    """Return all v for which the slope b + 2 c v may be 0; everything if the curvature may be.

    covariance: of (c, b), [2, 2]
    """
    (of_c, of_bc), (_, of_b) = quantile**2 * covariance
    # (b + 2 c v)^2 <= quantile^2 Var(b + 2 c v)
    p, half_q, r = 4 * (c**2 - of_c), 2 * (b * c - of_bc), b**2 - of_b
    if p <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(half_q**2 - p * r, 0.0))
    return (-half_q - root) / p, (-half_q + root) / p
