"""What a table's columns hold: statistics over seeds, rows compared seed by seed, and published numbers."""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import ttest_1samp

from common.experiments.collect import Collection
from common.experiments.quantities import LABELS, PUBLISHED, STATISTICS, Column
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.published import Published, published_values

LEVEL = 0.05
FEWEST_SEEDS = 3
EMPTY = {"mean": "missing", "median": "missing", "published": "unknown"}  # what readers see where there is no number
Values = Mapping[Hashable, float | None]  # a quantity by seed
# Statistics over all seeds of a row. The numbers are in ascending order, with NaN at the worse end.
OVER_SEEDS: Mapping[str, Callable[[Sequence[float]], float | None]] = {
    "mean": lambda numbers: math.fsum(numbers) / len(numbers),
    "2sigma": lambda numbers: 2 * statistics.stdev(numbers) if len(numbers) > 1 else None,
    "median": lambda numbers: sum(middle := numbers[(len(numbers) - 1) // 2 : len(numbers) // 2 + 1]) / len(middle),
    "lowest": lambda numbers: numbers[0],
    "highest": lambda numbers: numbers[-1],
    "reached": lambda numbers: sum(map(math.isfinite, numbers)),
}


def over_seeds(column: Column, values: Sequence[float | None]) -> float | None:
    """Return a column's statistic over all seeds; None unless each has a number, so that a row has one n."""
    if not values or None in values:
        return None
    if column.statistic == "2sigma" and len(values) > 1 and not all(map(math.isfinite, values)):
        return math.nan
    worst = -math.inf if column.quantity.higher_is_better else math.inf
    return OVER_SEEDS[column.statistic](sorted(values, key=lambda value: worst if math.isnan(value) else value))


# Two rows, compared seed by seed.


class ComparisonError(ValueError):
    """Two rows that cannot be compared seed by seed; the message is the reason as readers see it."""


def paired_differences(values: Values, others: Values) -> list[float]:
    """Return values - others, seed by seed.

    Raises ComparisonError for missing or diverged runs, seeds that only one side has, and fewer than three seeds.
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
    """Return the mean and its 95 % t interval; no interval if all differences are the same."""
    mean = math.fsum(differences) / len(differences)
    if not vary(differences):
        return mean, None, None
    interval = ttest_1samp(differences, 0).confidence_interval(1 - LEVEL)
    return mean, float(interval.low), float(interval.high)


def p_within(differences: Sequence[float], margin: float) -> float:
    """Return p of the equivalence test, two one-sided t-tests: small if the mean difference is within the margin."""
    return float(max(_p(differences, -margin, "greater"), _p(differences, margin, "less")))


def p_beyond(differences: Sequence[float], margin: float) -> float:
    """Return p of the opposite test, on either side: small if the mean difference exceeds the margin."""
    return float(min(1, 2 * min(_p(differences, margin, "greater"), _p(differences, -margin, "less"))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, so that 5 % is the chance of one or more false positives in all."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _p(differences: Sequence[float], mean: float, alternative: str) -> float:
    return ttest_1samp(differences, mean, alternative=alternative).pvalue if vary(differences) else 1.0


def vary(differences: Sequence[float]) -> bool:
    """Return whether differences vary by more than rounding."""
    return not np.allclose(differences, differences[0], rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Comparison:
    """A row compared with another one; where there is nothing to compare, mean is None and a reason is given.

    mean:    of the differences, or the geometric mean of speed-ups
    low:     the lower end of its 95 % t interval; None if the difference is the same for every seed
    high:    the upper end
    other:   the other row's name in equivalence tests; None if the table does not compare the row
    within:  p of the test that finds the difference within the margin
    beyond:  p of the test that finds it larger
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    other: str | None = None
    within: float = 1.0
    beyond: float = 1.0

    @property
    def verdict(self) -> str | None:
        """Return whether the rows are equal: yes, no or undecided; None where there is nothing to compare."""
        if self.mean is None:
            return None
        return "yes" if self.within < LEVEL else "no" if self.beyond < LEVEL else "undecided"


def difference(
    values: Values, others: Values, other: str | None = None, margin: float | None = None, ratios: bool = False
) -> Comparison:
    """Return values - others, or others / values as geometric mean; given a margin, test whether it is within it."""
    if ratios and math.inf in (*values.values(), *others.values()):
        return Comparison(reason="not reached by all")
    if ratios and any(value is not None and value <= 0 for value in (*values.values(), *others.values())):
        return Comparison(reason="not positive")
    if ratios:
        others, values = ({seed: v and math.log(v) for seed, v in of.items()} for of in (values, others))
    try:
        differences = paired_differences(values, others)
    except ComparisonError as reason:
        return Comparison(reason=str(reason), other=other)
    ends = mean_and_interval(differences)
    if ratios:
        ends = (None if end is None else math.exp(end) for end in ends)
    if margin is None:
        return Comparison(*ends)
    within, beyond = p_within(differences, margin), p_beyond(differences, margin)
    return Comparison(*ends, other=other, within=within, beyond=beyond)


def corrected(cells: Sequence[Comparison]) -> list[Comparison]:
    """Return all equivalence tests of a table, corrected for their number by Holm's method.

    Tests whose runs are missing count too: otherwise a verdict would change with what else has been run.
    """
    within, beyond = holm([cell.within for cell in cells]), holm([cell.beyond for cell in cells])
    return [replace(cell, within=p, beyond=q) for cell, p, q in zip(cells, within, beyond, strict=True)]


# The columns of a table.


def columns_of(collection: Collection) -> dict[str, list[float | Comparison | None]]:
    """Return {column: the values of all rows} for the number columns; equivalence tests are corrected together."""
    table = collection.table
    values = {}
    for column in table.numbers:
        of_rows = collection.values(column) if column.of_runs else {}
        values[column.name] = [_value(table, row, column, of_rows) for row in table.rows]
    tests = [
        (name, row)
        for row in range(len(table.rows))
        for name, of in values.items()
        if isinstance(of[row], Comparison) and of[row].other
    ]
    for (name, row), value in zip(tests, corrected([values[name][row] for name, row in tests]), strict=True):
        values[name][row] = value
    return values


def _value(table: Table, row: Row, column: Column, values: Mapping[str, Values]) -> float | Comparison | None:
    """Return a column's value for a row; `values` has its quantity for each row and seed."""
    if column.statistic in PUBLISHED:
        return _published(table, row, column)
    if column.statistic in OVER_SEEDS:
        return over_seeds(column, list(values[row.name].values()))
    margin = table.margins.get(column.quantity.name)
    if column.statistic in ("margin", "equivalent"):
        other = table.equivalent_of(row)
        if column.statistic == "margin":
            return margin if other else None
        return difference(values[row.name], values[other], other, margin) if other else Comparison()
    baseline = table.baseline_of(row)
    if baseline is None:
        own_name = row.name.removesuffix(f"_{row.workers}")
        return Comparison(reason="baseline" if own_name == table.baseline else "no baseline")
    return difference(values[row.name], values[baseline], ratios=column.statistic == "speedup")


def published_of(table: Table, row: str | None, column: Column) -> Published | None:
    """Return the published number of a row's quantity; None without an entry, even one that says it is unknown."""
    return published_values(table.published).get(row, {}).get(column.published_name)


def _published(table: Table, row: Row, column: Column) -> float | None:
    number = published_of(table, row.name, column)
    if column.statistic not in ("published_difference", "published_equivalent"):
        return number and (number.two_sigma if column.statistic == "published_2sigma" else number.value)
    of_other = table.baseline_of if column.statistic == "published_difference" else table.equivalent_of
    other = published_of(table, of_other(row), column)
    return None if None in (number, other) or None in (number.value, other.value) else number.value - other.value


def definition(table: Table, column: Column) -> str:
    """Return the definition of a column."""
    if column.quantity is None:
        return table.labels.get(column.name) or LABELS[column.name]
    quantity = column.quantity
    text = STATISTICS[column.statistic].format(
        quantity=quantity.name,
        what=quantity.definition,
        baseline=table.baseline,
        margin=table.margins.get(quantity.name, math.nan),
    )
    over = column.variant or ("mean over variants" if table.variants and column.of_runs else None)
    if over and column.statistic != "equivalent":
        text = f"{over}: {text}"
    if column.statistic == "published" and table.proxy_of:
        text += f", for {table.proxy_of} at the paper's scale; only the order of rows can be compared with the proxy"
    return text


def show(column: Column, value: object) -> str:
    """Return a value as readers see it: mean [low, high] for comparisons, the verdict for equivalence tests."""
    quantity, statistic = column.quantity, column.statistic
    if quantity is None:
        return "" if value is None else str(value)
    if isinstance(value, Comparison):
        if value.mean is None or statistic == "equivalent":
            return value.reason if value.mean is None else value.verdict.replace("undecided", "open")
        # z: no minus sign before what rounds to zero
        style, alike = (".2f", "") if statistic == "speedup" else (f"+z{quantity.style}", " in every seed")
        interval = alike if value.low is None else f" [{value.low:{style}}, {value.high:{style}}]"
        return f"{value.mean:{style}}{interval}"
    if value is None:
        return (statistic in ("mean", "median") and quantity.absent) or EMPTY.get(statistic, "")
    signed = "+z" * (statistic in ("published_difference", "published_equivalent"))
    return format(value, signed + {"reached": ".0f", "margin": "g"}.get(statistic, quantity.style))


def exact(column: Column, value: object) -> dict[str, object]:
    """Return a value's cells in CSV files: {column: number or text}, None where there is nothing."""
    if not isinstance(value, Comparison):
        return {column.name: value}
    parts = {"": value.mean, "_low": value.low, "_high": value.high}
    if column.statistic == "equivalent":
        within, beyond = (None, None) if value.mean is None else (value.within, value.beyond)
        test = {"": value.verdict, "_to": value.other, "_p_within": within, "_p_beyond": beyond}
        parts = test | {f"_difference{ending}": part for ending, part in parts.items()}
    return {f"{column.name}{ending}": part for ending, part in parts.items()}
