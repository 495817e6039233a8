"""The columns of a table, parsed once from their names: a label, or `[<variant>_]<quantity>[_<statistic>]`."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.report.comparisons import Compared, Equivalence, Speedup
from common.report.published import Published
from common.report.quantities import QUANTITIES, Quantity
from common.report.runs import FinishedRun
from common.spelling import did_you_mean


@dataclass(frozen=True)
class Label:
    """A column of texts that tell rows apart; `left` is where it is aligned."""

    name: str
    definition: str
    left: bool = True

    def show(self, value: object) -> str:
        """Return a value as readers see it."""
        return "" if value is None else str(value)

    def exact(self, value: object) -> dict[str, object]:
        """Return what CSV files hold of a value."""
        return {self.name: value}


LABELS = {
    label.name: label
    for label in (
        Label("method", "what is trained: the gradient exchange and the optimizer"),
        Label("topology", "who exchanges with whom"),
        Label("workers", "number of workers", left=False),
        Label(
            "seeds",
            "number of finished seeds: the n of every mean and deviation in the row",
            left=False,
        ),
    )
}


@dataclass(frozen=True)
class RowData:
    """What a row's numbers are computed from.

    runs:        its finished runs (of one variant, if the table has variants)
    baseline:    those of the row that differences are taken from; None for that row itself
    equal_to:    the name of the row that it is tested to equal, if any
    equal_runs:  the runs of that row
    published:   {[<variant>_]<quantity>: number} of the papers; also of the baseline and of the row `equal_to`
    """

    runs: Sequence[FinishedRun]
    baseline: Sequence[FinishedRun] | None = None
    equal_to: str | None = None
    equal_runs: Sequence[FinishedRun] = ()
    published: Mapping[str, Published] = field(default_factory=dict)
    baseline_published: Mapping[str, Published] = field(default_factory=dict)
    equal_published: Mapping[str, Published] = field(default_factory=dict)


Value = float | Compared | None


@dataclass(frozen=True)
class Statistic:
    """How the runs of a row, or what is published of it, become a column's number.

    definition:  with {quantity} for the quantity's name, {what} for its definition, {baseline} and {margin}
    of:          compute it; None where there is no number
    empty:       what readers see where there is no number
    spread:      the name of the statistic that is shown behind this one, after a plus-minus sign
    of_runs:     whether it needs the quantity of every run
    style:       its format for reading; {} is the quantity's
    """

    name: str
    definition: str
    of: Callable[["Column", RowData], Value]
    empty: str = ""
    spread: str | None = None
    of_runs: bool = True
    style: str = "{}"


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of comparisons with another row.

    margin: how far apart rows may be to count as equal
    """

    name: str
    variant: str | None
    quantity: Quantity
    statistic: Statistic
    definition: str
    margin: float | None = None

    def of(self, row: RowData) -> Value:
        """Return the value of a row; None if there is none."""
        return self.statistic.of(self, row)

    def show(self, value: Value) -> str:
        """Return a value as readers see it."""
        if isinstance(value, Compared):
            return value.show(self.quantity.style)
        if value is None:
            return (self.statistic in (MEAN, MEDIAN) and self.quantity.absent) or self.statistic.empty
        return format(value, self.statistic.style.format(self.quantity.style))

    def exact(self, value: Value) -> dict[str, object]:
        """Return what CSV files hold of a value: {column: number or text}, None where there is nothing."""
        parts = value.parts() if isinstance(value, Compared) else {"": value}
        return {f"{self.name}{ending}": part for ending, part in parts.items()}

    def by_seed(self, runs: Sequence[FinishedRun]) -> dict[int, float | None]:
        """Return the quantity of these runs by seed."""
        return {run.seed: self.quantity.of(run) for run in runs}

    @property
    def published_name(self) -> str:
        """The quantity's name in the papers' files."""
        return self.quantity.name if self.variant is None else f"{self.variant}_{self.quantity.name}"

    def is_spread_of(self, other: "Column") -> bool:
        """Whether this column holds the deviations of the other one's numbers."""
        same = (self.variant, self.quantity) == (other.variant, other.quantity)
        return same and self.statistic.name == other.statistic.spread


def _mean(column: Column, row: RowData) -> float | None:
    values = column.quantity.of_all(row.runs)
    return math.fsum(values) / len(values) if values else None


def _two_sigma(column: Column, row: RowData) -> float | None:
    values = column.quantity.of_all(row.runs)
    if len(values) < 2:
        return None
    return 2 * statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _ascending(column: Column, row: RowData) -> list[float]:
    """Return the numbers of all runs, NaN at the worse end."""
    worst = -math.inf if column.quantity.higher_is_better else math.inf
    return sorted(column.quantity.of_all(row.runs), key=lambda value: worst if math.isnan(value) else value)


def _median(column: Column, row: RowData) -> float | None:
    values = _ascending(column, row)
    middle = values[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) / len(middle) if values else None


def _nth(index: int) -> Callable[[Column, RowData], float | None]:
    def nth(column: Column, row: RowData) -> float | None:
        values = _ascending(column, row)
        return values[index] if values else None

    return nth


def _finite(column: Column, row: RowData) -> float | None:
    values = column.quantity.of_all(row.runs)
    return sum(map(math.isfinite, values)) if values else None


def _speedup(column: Column, row: RowData) -> Compared:
    if row.baseline is None:
        return Compared(None, "baseline")
    return Speedup.of(column.by_seed(row.runs), column.by_seed(row.baseline))


def _difference(column: Column, row: RowData) -> Compared:
    if row.baseline is None:
        return Compared(None, "baseline")
    return Compared.of(column.by_seed(row.runs), column.by_seed(row.baseline))


def _equivalence(column: Column, row: RowData) -> Equivalence:
    if row.equal_to is None:
        return Equivalence(None)
    return Equivalence.to(row.equal_to, column.margin, column.by_seed(row.runs), column.by_seed(row.equal_runs))


def _published(column: Column, row: RowData) -> float | None:
    number = row.published.get(column.published_name)
    return None if number is None else number.value


def _published_two_sigma(column: Column, row: RowData) -> float | None:
    number = row.published.get(column.published_name)
    return None if number is None else number.two_sigma


def _published_minus(name: str, other: str, numbers_of_other: str) -> Statistic:
    def minus(column: Column, row: RowData) -> float | None:
        pair = [numbers.get(column.published_name) for numbers in (row.published, getattr(row, numbers_of_other))]
        return None if None in pair or None in (pair[0].value, pair[1].value) else pair[0].value - pair[1].value

    what = f"{{quantity}}: what is published, the row's minus that of {other}"
    return Statistic(f"published_{name}", what, minus, of_runs=False, style="+z{}")


MEAN = Statistic("mean", "{what}; mean over seeds", _mean, empty="missing", spread="2sigma")
MEDIAN = Statistic("median", "{what}; median over seeds", _median, empty="missing")
SPEEDUP = Statistic(
    "speedup",
    "{quantity}: the baseline's over the row's, {baseline}; geometric mean of the ratios seed by seed [the 95 % t "
    "interval of their logarithms, taken back]",
    _speedup,
)
DIFFERENCE = Statistic(
    "difference",
    "{quantity}: the row's minus that of the baseline, {baseline}; mean of the differences seed by seed "
    "[their 95 % t interval, each on its own]",
    _difference,
)
EQUIVALENT = Statistic(
    "equivalent",
    "{quantity}: whether the row equals the row named in the cell to within {margin:g}, and the difference to it [its "
    "95 % t interval]: two one-sided t-tests of the differences seed by seed; p is corrected by Holm's method for all "
    "such comparisons of this table. yes: within the margin (p < 0.05); no: beyond it (by the opposite test, corrected "
    "likewise); undecided: neither",
    _equivalence,
)
MARGIN = Statistic(
    "margin",
    "{quantity}: the margin within which the row is tested to equal another one",
    lambda column, row: column.margin if row.equal_to else None,
    style="g",
)
PUBLISHED = Statistic(
    "published",
    "{quantity}: the published value, not measured here",
    _published,
    empty="unknown",
    spread="published_2sigma",
    of_runs=False,
)
STATISTICS = (
    MEAN,
    Statistic("2sigma", "{what}; 2 x sample standard deviation over seeds (n - 1; empty for one seed)", _two_sigma),
    DIFFERENCE,
    EQUIVALENT,
    MARGIN,
    PUBLISHED,
    _published_minus("difference", "the baseline", "baseline_published"),
    _published_minus("equivalent", "the row that it is tested to equal", "equal_published"),
    MEDIAN,
    Statistic("lowest", "{what}; the lowest of all seeds", _nth(0)),
    Statistic("highest", "{what}; the highest of all seeds", _nth(-1)),
    Statistic("reached", "{quantity}: in how many of the runs it is finite", _finite, style=".0f"),
    SPEEDUP,
    Statistic("published_2sigma", "{quantity}: its published 2 sigma", _published_two_sigma, of_runs=False),
    Statistic("by_formula", "{quantity}: the paper's formula, evaluated by us", _published, of_runs=False),
)
# What a column may be called after its variant; a quantity alone is its mean.
NUMBERS = {name: (quantity, MEAN) for name, quantity in QUANTITIES.items()} | {
    f"{quantity.name}_{statistic.name}": (quantity, statistic)
    for quantity in QUANTITIES.values()
    for statistic in STATISTICS
}

DEFAULT_COLUMNS = (
    "method",
    "topology",
    "workers",
    "seeds",
    "local_over_noise_mean",
    "global_over_noise_mean",
    "accuracy_mean",
    "accuracy_2sigma",
    "train_loss_mean",
    "consensus_distance_mean",
    "bytes_per_step",
    "time_step_ms",
)


def parse_column(
    name: str,
    labels: Mapping[str, str],
    variants: Iterable[str] = (),
    baseline: str | None = None,
    proxy_of: str | None = None,
    margins: Mapping[str, float] | None = None,
) -> Column | Label:
    """Return the column of this name in a table with these labels, variants, baseline row, original and margins.

    Raises ValueError with the nearest known name, or for a comparison without a baseline or margin.
    """
    if name in labels:
        return Label(name, labels[name])
    if name in LABELS:
        return LABELS[name]
    variant = next((variant for variant in variants if name.startswith(f"{variant}_")), None)
    rest = name if variant is None else name.removeprefix(f"{variant}_")
    if rest not in NUMBERS:
        close = did_you_mean(rest, [*LABELS, *labels, *NUMBERS]).removeprefix("; ")
        raise ValueError(f"{close} expected a label or <quantity>_<statistic>, see results/README.md".lstrip())
    quantity, statistic = NUMBERS[rest]
    margin = (margins or {}).get(quantity.name) if statistic in (EQUIVALENT, MARGIN) else None
    if statistic in (DIFFERENCE, SPEEDUP) and baseline is None:
        raise ValueError("differences and speed-ups need a baseline, the row to compare with")
    if statistic in (EQUIVALENT, MARGIN) and margin is None:
        raise ValueError(f"it needs margins.{quantity.name}: how far apart rows may be to count as equal")
    definition = statistic.definition.format(
        quantity=quantity.name, what=quantity.definition, baseline=baseline, margin=margin
    )
    if variant is not None:
        definition = f"{variant}: {definition}"
    if statistic is PUBLISHED and proxy_of:
        definition += f", of {proxy_of}, at the paper's scale: only the order of rows can be compared with the proxy"
    return Column(name, variant, quantity, statistic, definition, margin)
