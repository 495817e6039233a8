"""What cells of tables hold of a comparison of two rows."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.report.significance import (
    LEVEL,
    ComparisonError,
    Difference,
    holm,
    p_beyond,
    p_within,
    paired_differences,
)

Values = Mapping[Hashable, float | None]  # a quantity by seed


@dataclass(frozen=True)
class Compared:
    """The difference of two rows, or the reason why there is none."""

    difference: Difference | None
    reason: str = ""

    @classmethod
    def of(cls, values: Values, baseline: Values) -> "Compared":
        """Compare two rows."""
        try:
            return cls(Difference.of(paired_differences(values, baseline)))
        except ComparisonError as reason:
            return cls(None, str(reason))

    def show(self, style: str) -> str:
        """Return it as readers see it: mean [low, high]."""
        if self.difference is None:
            return self.reason
        found = self.difference
        signed = f"+z{style}"  # z: no minus sign before what rounds to zero
        if found.low is None:
            return f"{found.mean:{signed}} in every seed"
        return f"{found.mean:{signed}} [{found.low:{signed}}, {found.high:{signed}}]"

    def parts(self) -> dict[str, object]:
        """Return what CSV files hold in columns with these endings; None where there is nothing."""
        endings = {"": "mean", "_low": "low", "_high": "high"}
        return {ending: getattr(self.difference, part, None) for ending, part in endings.items()}


@dataclass(frozen=True)
class Speedup(Compared):
    """How many times as fast a row is as the baseline, from differences of logarithms."""

    @classmethod
    def of(cls, values: Values, baseline: Values) -> "Speedup":
        """Compare the times of two rows; infinite ones were never reached."""
        if math.inf in (*values.values(), *baseline.values()):
            return cls(None, "not reached by all")
        try:
            return cls(Difference.of(paired_differences(_logarithms(baseline), _logarithms(values))).exponentials())
        except ComparisonError as reason:
            return cls(None, str(reason))

    def show(self, style: str) -> str:
        """Return it as readers see it: mean [low, high]."""
        found = self.difference
        if found is None:
            return self.reason
        interval = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
        return f"{found.mean:.2f}{interval}"


def _logarithms(values: Values) -> Values:
    return {seed: value if value is None else math.log(value) for seed, value in values.items()}


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
            return cls(None, str(reason), other)
        difference = Difference.of(differences)
        return cls(difference, "", other, p_within(differences, margin), p_beyond(differences, margin))

    @property
    def verdict(self) -> str:
        """Return yes, no or undecided."""
        return "yes" if self.within < LEVEL else "no" if self.beyond < LEVEL else "undecided"

    def show(self, style: str) -> str:
        """Return it as readers see it: verdict, p, the other row, and the difference to it."""
        if self.other is None or self.difference is None:
            return self.reason
        p = self.beyond if self.verdict == "no" else self.within
        return f"{self.verdict} (p = {p:.2g}), to {self.other}: {super().show(style)}"

    def parts(self) -> dict[str, object]:
        """Return what CSV files hold in columns with these endings; None where there is nothing."""
        tested = self.difference is not None
        return {
            "": self.verdict if tested else None,
            "_to": self.other,
            "_p_within": self.within if tested else None,
            "_p_beyond": self.beyond if tested else None,
            **{f"_difference{ending}": part for ending, part in super().parts().items()},
        }


def corrected(cells: Sequence[Equivalence]) -> list[Equivalence]:
    """Return all comparisons of a table, corrected for their number by Holm's method.

    Those whose runs are missing count too: otherwise a verdict would change with what else has been run.
    """
    within, beyond = holm([cell.within for cell in cells]), holm([cell.beyond for cell in cells])
    return [replace(cell, within=p, beyond=q) for cell, p, q in zip(cells, within, beyond, strict=True)]
