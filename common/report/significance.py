"""Two rows compared seed by seed: how far apart they are, and whether that is less than a margin."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_1samp

LEVEL = 0.05
FEWEST_SEEDS = 3


class ComparisonError(ValueError):
    """Two rows that cannot be compared seed by seed; the message is the reason as readers see it."""


def paired_differences(values: Mapping[Hashable, float | None], others: Mapping[Hashable, float | None]) -> list[float]:
    """Return values - others, seed by seed.

    Raises ComparisonError for missing or diverged runs, seeds that only one side has, and fewer than three of them.
    """
    if not values or not others or None in (*values.values(), *others.values()):
        raise ComparisonError("missing")
    if values.keys() != others.keys():
        raise ComparisonError("other seeds")
    if len(values) < FEWEST_SEEDS:
        raise ComparisonError(f"fewer than {FEWEST_SEEDS} seeds")
    differences = [values[seed] - others[seed] for seed in sorted(values)]
    if not all(map(math.isfinite, differences)):
        raise ComparisonError("diverged")
    return differences


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its 95 % t interval; no interval if they are all the same."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        """Estimate it from the differences of all seeds."""
        mean = math.fsum(differences) / len(differences)
        if not _spread(differences):
            return cls(mean, None, None)
        interval = ttest_1samp(differences, 0).confidence_interval(1 - LEVEL)
        return cls(mean, float(interval.low), float(interval.high))

    def exponentials(self) -> "Difference":
        """Return the ratio of which this is the logarithm."""
        return Difference(*(None if part is None else math.exp(part) for part in (self.mean, self.low, self.high)))


def p_within(differences: Sequence[float], margin: float) -> float:
    """Return p of the equivalence test, two one-sided t-tests: small if the mean difference is within the margin."""
    if not _spread(differences):
        return 1.0
    return float(max(_p(differences, -margin, "greater"), _p(differences, margin, "less")))


def p_beyond(differences: Sequence[float], margin: float) -> float:
    """Return p of the opposite, on either side: small if the mean difference exceeds the margin."""
    if not _spread(differences):
        return 1.0
    return float(min(1, 2 * min(_p(differences, margin, "greater"), _p(differences, -margin, "less"))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, so that 5 % is the chance of one or more false positives in all."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _p(differences: Sequence[float], mean: float, alternative: str) -> float:
    return ttest_1samp(differences, mean, alternative=alternative).pvalue


def _spread(differences: Sequence[float]) -> bool:
    """Whether differences vary by more than rounding."""
    return not np.allclose(differences, differences[0], rtol=1e-9, atol=1e-12)
