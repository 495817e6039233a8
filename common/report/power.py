"""How many seeds a table's comparisons need, estimated from the scatter of the existing runs."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable

import pandas as pd
from scipy.stats import chi2, nct, t

from common.experiments.collect import Collection
from common.experiments.quantities import Column
from common.experiments.table_file import Row
from common.report.statistics import FEWEST_SEEDS, LEVEL, ComparisonError, paired_differences, published_of, vary

POWER = 0.8
CONFIDENCE = 0.8  # of the standard deviation's upper limit
MOST_SEEDS = 10_000
MOST_SHIFT = 1e6  # of a noncentral t distribution: beyond 1e9 scipy returns NaN
DEFINITIONS = {
    "sd": "standard deviation of the differences seed by seed",
    "sd_limit": f"its upper {CONFIDENCE:.0%} confidence limit, because it is estimated from few seeds",
    "published": "the published difference of the two rows",
    "margin": "how far apart they may be and still count as equal; marked if above half of the published difference",
    "for_equality": f"seeds needed to find equal rows equal in {POWER:.0%} of all cases, at a level of {LEVEL:.0%} "
    "over all tests of the table [with sd_limit]",
    "for_published": f"seeds needed to tell a true difference of the published size from zero in {POWER:.0%} of all "
    f"cases, two-sided at {LEVEL:.0%} [with sd_limit]",
}


def power_of_equality(seeds: int, sd: float, margin: float, level: float) -> float:
    """Return the chance that two one-sided t-tests find a mean difference of zero within the margin.

    seeds:  number of differences
    sd:     their true standard deviation
    level:  of each test

    The chances that either test fails are added, so the result is slightly too low where it is far from 1.
    """
    return max(0.0, 2 * _beyond(seeds, margin / sd, level) - 1)


def power_of_difference(seeds: int, sd: float, effect: float, level: float) -> float:
    """Return the chance that a two-sided t-test tells this mean difference from zero, on the right side."""
    return _beyond(seeds, abs(effect) / sd, level / 2)


def _beyond(seeds: int, effect: float, level: float) -> float:
    """Return the chance that a one-sided t-test finds a mean of `effect` standard deviations above zero."""
    return float(nct.sf(t.isf(level, seeds - 1), seeds - 1, min(effect * math.sqrt(seeds), MOST_SHIFT)))


def seeds_for(power: Callable[..., float], *options: float) -> int | None:
    """Return how many seeds give a test enough power(seeds, *options); None if MOST_SEEDS are too few."""
    counts = range(FEWEST_SEEDS, MOST_SEEDS + 1)
    found = bisect_left(counts, POWER, key=lambda seeds: power(seeds, *options))
    return counts[found] if found < len(counts) else None


def power_frame(collection: Collection) -> pd.DataFrame:
    """Return a line of texts for each comparison of the table: how many seeds it needs to be decided."""
    table = collection.table
    compared = [
        (column, row, other)
        for statistic, other_of in (("equivalent", table.equivalent_of), ("difference", table.baseline_of))
        for column in table.numbers
        if column.statistic == statistic
        for row in table.rows
        if (other := other_of(row))
    ]
    tests = sum(column.statistic == "equivalent" for column, _, _ in compared)
    return pd.DataFrame([_line(collection, *these, LEVEL / max(tests, 1)) for these in compared])


def _line(collection: Collection, column: Column, row: Row, other: str, level: float) -> dict[str, str]:
    """Return the line of a row and another one; `level` is the level of the first step of Holm's method."""
    table, style = collection.table, column.quantity.style
    margin = table.margins.get(column.quantity.name) if column.statistic == "equivalent" else None
    first, second = (of and of.value for of in (published_of(table, name, column) for name in (row.name, other)))
    published = None if None in (first, second) else first - second
    too_wide = margin and published is not None and margin > abs(published) / 2
    line = {"row": row.name, "other": other, "quantity": column.published_name, "seeds": ""}
    line |= dict.fromkeys(DEFINITIONS, "")
    line["published"] = "not known" if published is None else f"{published:+{style}}"
    line["margin"] = f"{margin:g}{' (too wide)' * bool(too_wide)}" if margin else ""
    values = collection.values(column)
    try:
        differences = paired_differences(values[row.name], values[other])
    except ComparisonError as reason:
        return line | {"seeds": str(reason)}
    freedom, sd = len(differences) - 1, statistics.stdev(differences)
    limit = sd * math.sqrt(freedom / chi2.ppf(1 - CONFIDENCE, freedom))
    line |= {"seeds": str(len(differences)), "sd": f"{sd:{style}}", "sd_limit": f"{limit:{style}}"}
    for key, power, apart, at in (
        ("for_equality", power_of_equality, margin, level),
        ("for_published", power_of_difference, published, LEVEL),
    ):
        if apart and vary(differences):
            counts = [seeds_for(power, of, apart, at) for of in (sd, limit)]
            line[key] = "{} [{}]".format(*(f"> {MOST_SEEDS}" if count is None else count for count in counts))
    return line
