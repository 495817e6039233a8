"""Two rows compared seed by seed: how far apart they are, whether within a margin, and what cells show of it."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import ttest_1samp

LEVEL = 0.05
FEWEST_SEEDS = 3
Values = Mapping[Hashable, float | None]  # a quantity by seed


class ComparisonError(ValueError):
    """Two rows that cannot be compared seed by seed; the message is the reason as readers see it."""


def paired_differences(values: Values, others: Values) -> list[float]:
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


def mean_and_interval(differences: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and its 95 % t interval; no interval if they are all the same."""
    mean = math.fsum(differences) / len(differences)
    if not _spread(differences):
        return mean, None, None
    interval = ttest_1samp(differences, 0).confidence_interval(1 - LEVEL)
    return mean, float(interval.low), float(interval.high)


def p_within(differences: Sequence[float], margin: float) -> float:
    """Return p of the equivalence test, two one-sided t-tests: small if the mean difference is within the margin."""
    return float(max(_p(differences, -margin, "greater"), _p(differences, margin, "less")))


def p_beyond(differences: Sequence[float], margin: float) -> float:
    """Return p of the opposite, on either side: small if the mean difference exceeds the margin."""
    return float(min(1, 2 * min(_p(differences, margin, "greater"), _p(differences, -margin, "less"))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, so that 5 % is the chance of one or more false positives in all."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _p(differences: Sequence[float], mean: float, alternative: str) -> float:
    return ttest_1samp(differences, mean, alternative=alternative).pvalue if _spread(differences) else 1.0


def _spread(differences: Sequence[float]) -> bool:
    """Whether differences vary by more than rounding."""
    return not np.allclose(differences, differences[0], rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Compared:
    """The difference of two rows with its interval; a mean of None, and why, where there is none."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, values: Values, others: Values) -> "Compared":
        """Return values - others."""
        try:
            return cls(*mean_and_interval(paired_differences(values, others)))
        except ComparisonError as reason:
            return cls(reason=str(reason))

    def show(self, style: str) -> str:
        """Return it as readers see it: mean [low, high]."""
        return self._show(f"+z{style}", " in every seed")  # z: no minus sign before what rounds to zero

    def _show(self, style: str, constant: str) -> str:
        if self.mean is None:
            return self.reason
        interval = constant if self.low is None else f" [{self.low:{style}}, {self.high:{style}}]"
        return f"{self.mean:{style}}{interval}"

    def parts(self) -> dict[str, object]:
        """Return what CSV files hold in columns with these endings; None where there is nothing."""
        return {"": self.mean, "_low": self.low, "_high": self.high}


class Speedup(Compared):
    """How many times as fast a row is as the baseline, from differences of logarithms."""

    @classmethod
    def of(cls, values: Values, others: Values) -> "Speedup":
        """Compare the times of two rows; infinite ones were never reached."""
        if math.inf in (*values.values(), *others.values()):
            return cls(reason="not reached by all")
        logarithms = ({seed: v if v is None else math.log(v) for seed, v in of.items()} for of in (others, values))
        found = Compared.of(*logarithms)
        ends = (None if end is None else math.exp(end) for end in (found.mean, found.low, found.high))
        return cls(*ends, reason=found.reason)

    def show(self, style: str) -> str:
        """Return it as readers see it: ratio [low, high]."""
        return self._show(".2f", "")


@dataclass(frozen=True)
class Equivalence(Compared):
    """Whether a row equals another one up to a margin.

    other:   the other row's name; None if the table does not compare the row
    within:  p of the test that finds the difference within the margin
    beyond:  p of the test that finds it larger
    """

    other: str | None = None
    within: float = 1.0
    beyond: float = 1.0

    @classmethod
    def to(cls, other: str, margin: float, values: Values, others: Values) -> "Equivalence":
        """Compare a row with the other one, without any correction for the number of comparisons."""
        try:
            differences = paired_differences(values, others)
        except ComparisonError as reason:
            return cls(reason=str(reason), other=other)
        within, beyond = p_within(differences, margin), p_beyond(differences, margin)
        return cls(*mean_and_interval(differences), other=other, within=within, beyond=beyond)

    @property
    def verdict(self) -> str:
        """Return yes, no or undecided."""
        return "yes" if self.within < LEVEL else "no" if self.beyond < LEVEL else "undecided"

    def show(self, style: str) -> str:
        """Return it as readers see it: verdict, p, the other row, and the difference to it."""
        if self.mean is None:
            return self.reason
        p = self.beyond if self.verdict == "no" else self.within
        return f"{self.verdict} (p = {p:.2g}), to {self.other}: {super().show(style)}"

    def parts(self) -> dict[str, object]:
        """Return what CSV files hold in columns with these endings; None where there is nothing."""
        verdict, within, beyond = (None,) * 3 if self.mean is None else (self.verdict, self.within, self.beyond)
        test = {"": verdict, "_to": self.other, "_p_within": within, "_p_beyond": beyond}
        return test | {f"_difference{ending}": part for ending, part in super().parts().items()}


def corrected(cells: Sequence[Equivalence]) -> list[Equivalence]:
    """Return all comparisons of a table, corrected for their number by Holm's method.

    Those whose runs are missing count too: otherwise a verdict would change with what else has been run.
    """
    within, beyond = holm([cell.within for cell in cells]), holm([cell.beyond for cell in cells])
    return [replace(cell, within=p, beyond=q) for cell, p, q in zip(cells, within, beyond, strict=True)]
