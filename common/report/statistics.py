"""What a table's columns hold: statistics over seeds, comparisons of rows, and published numbers beside them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from common.experiments.collect import Collection
from common.experiments.columns import LABELS, PUBLISHED, Column
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.comparisons import Compared, Equivalence, Speedup, Values, corrected
from common.report.published import Published, published_values

Value = float | Compared | None
Numbers = Sequence[float]  # of all seeds in ascending order, NaN at the worse end

DEFINITIONS = {
    "mean": "{what}; mean over seeds",
    "2sigma": "{what}; 2 x sample standard deviation over seeds (n - 1; empty for one seed)",
    "median": "{what}; median over seeds",
    "lowest": "{what}; the lowest of all seeds",
    "highest": "{what}; the highest of all seeds",
    "reached": "{quantity}: in how many of the runs it is finite",
    "difference": "{quantity}: the row's minus that of the baseline, {baseline}; mean of the differences seed by seed "
    "[their 95 % t interval, each on its own]",
    "speedup": "{quantity}: the baseline's over the row's, {baseline}; geometric mean of the ratios seed by seed [the "
    "95 % t interval of their logarithms, taken back]",
    "equivalent": "{quantity}: whether the row equals the row named in the cell to within {margin:g}, and the "
    "difference to it [its 95 % t interval]: two one-sided t-tests of the differences seed by seed; p is corrected by "
    "Holm's method for all such comparisons of this table. yes: within the margin (p < 0.05); no: beyond it (by the "
    "opposite test, corrected likewise); undecided: neither",
    "margin": "{quantity}: the margin within which the row is tested to equal another one",
    "published": "{quantity}: the published value, not measured here",
    "published_2sigma": "{quantity}: its published 2 sigma",
    "published_difference": "{quantity}: what is published, the row's minus that of the baseline",
    "published_equivalent": "{quantity}: what is published, the row's minus that of the row that it is tested to equal",
    "by_formula": "{quantity}: the paper's formula, evaluated by us",
}
SPREADS = {"mean": "2sigma", "published": "published_2sigma"}  # shown behind these, after a plus-minus sign
EMPTY = {"mean": "missing", "median": "missing", "published": "unknown"}  # what readers see where there is no number
STYLES = {"reached": ".0f", "margin": "g"}  # others have their quantity's


def definition(table: Table, column: Column) -> str:
    """Return what a column holds."""
    if column.quantity is None:
        return table.labels.get(column.name) or LABELS[column.name]
    quantity, statistic = column.quantity, column.statistic
    text = DEFINITIONS[statistic].format(
        quantity=quantity.name,
        what=quantity.definition,
        baseline=table.baseline,
        margin=table.margins.get(quantity.name, math.nan),
    )
    if column.variant is not None:
        text = f"{column.variant}: {text}"
    if statistic == "published" and table.proxy_of:
        text += f", of {table.proxy_of}, at the paper's scale: only the order of rows can be compared with the proxy"
    return text


def show(column: Column, value: object) -> str:
    """Return a value as readers see it."""
    quantity, statistic = column.quantity, column.statistic
    if quantity is None:
        return "" if value is None else str(value)
    if isinstance(value, Compared):
        return value.show(quantity.style)
    if value is None:
        return (statistic in ("mean", "median") and quantity.absent) or EMPTY.get(statistic, "")
    signed = "+z" * (statistic in ("published_difference", "published_equivalent"))
    return format(value, signed + STYLES.get(statistic, quantity.style))


def exact(column: Column, value: object) -> dict[str, object]:
    """Return what CSV files hold of a value: {column: number or text}, None where there is nothing."""
    parts = value.parts() if isinstance(value, Compared) else {"": value}
    return {f"{column.name}{ending}": part for ending, part in parts.items()}


def is_spread_of(column: Column, other: Column) -> bool:
    """Return whether a column holds the deviations of another one's numbers."""
    same = (column.variant, column.quantity) == (other.variant, other.quantity)
    return same and column.quantity is not None and column.statistic == SPREADS.get(other.statistic)


def columns_of(collection: Collection) -> dict[str, list[Value]]:
    """Return {column: the values of all rows} of the columns of numbers; equivalence tests are corrected together."""
    values = {column.name: _values(collection, column) for column in collection.table.numbers}
    tests = {
        (name, row): value
        for row in range(len(collection.table.rows))
        for name, of in values.items()
        if isinstance(value := of[row], Equivalence) and value.other
    }
    for (name, row), value in zip(tests, corrected(list(tests.values())), strict=True):
        values[name][row] = value
    return values


def _values(collection: Collection, column: Column) -> list[Value]:
    table = collection.table
    if column.statistic in PUBLISHED:
        return [_published(table, row, column) for row in table.rows]
    values = collection.values(column)
    if column.statistic in OVER_SEEDS:
        return [_over_seeds(column, list(values[row.name].values())) for row in table.rows]
    return [_compared(table, row, column, values) for row in table.rows]


OVER_SEEDS: Mapping[str, Callable[[Numbers], float | None]] = {
    "mean": lambda numbers: math.fsum(numbers) / len(numbers),
    "2sigma": lambda numbers: 2 * statistics.stdev(numbers) if len(numbers) > 1 else None,
    "median": lambda numbers: sum(middle := numbers[(len(numbers) - 1) // 2 : len(numbers) // 2 + 1]) / len(middle),
    "lowest": lambda numbers: numbers[0],
    "highest": lambda numbers: numbers[-1],
    "reached": lambda numbers: sum(map(math.isfinite, numbers)),
}


def _over_seeds(column: Column, values: Sequence[float | None]) -> float | None:
    if not values or None in values:  # n is the same for a whole row
        return None
    if column.statistic == "2sigma" and len(values) > 1 and not all(map(math.isfinite, values)):
        return math.nan
    worst = -math.inf if column.quantity.higher_is_better else math.inf
    return OVER_SEEDS[column.statistic](sorted(values, key=lambda value: worst if math.isnan(value) else value))


def _compared(table: Table, row: Row, column: Column, values: Mapping[str, Values]) -> Value:
    baseline, other, margin = table.baseline_of(row), table.equivalent_of(row), table.margins.get(column.quantity.name)
    if column.statistic == "margin":
        return margin if other else None
    if column.statistic == "equivalent":
        return Equivalence.to(other, margin, values[row.name], values[other]) if other else Equivalence()
    if baseline is None:
        return Compared(reason="baseline")
    comparison = Speedup if column.statistic == "speedup" else Compared
    return comparison.of(values[row.name], values[baseline])


def published_of(table: Table, row: str | None, column: Column) -> Published | None:
    """Return what is published of a row's quantity; None if nothing is, not even that it is unknown."""
    return published_values(table.published).get(row, {}).get(column.published_name)


def _published(table: Table, row: Row, column: Column) -> float | None:
    number = published_of(table, row.name, column)
    if column.statistic not in ("published_difference", "published_equivalent"):
        return number and (number.two_sigma if column.statistic == "published_2sigma" else number.value)
    of_other = table.baseline_of if column.statistic == "published_difference" else table.equivalent_of
    other = published_of(table, of_other(row), column)
    return None if None in (number, other) or None in (number.value, other.value) else number.value - other.value
