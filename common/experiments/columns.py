"""The columns of a table by their names: a label, or `[<variant>_]<quantity>[_<statistic>]`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.arguments import did_you_mean
from common.experiments.quantities import QUANTITIES, Quantity

LABELS = {
    "method": "what is trained: the gradient exchange and the optimizer",
    "topology": "who exchanges with whom",
    "workers": "number of workers",
    "seeds": "number of finished seeds: the n of every mean and deviation in the row",
}
STATISTICS = {  # and their definitions, as pages have them
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
    "equivalent": "whether the row equals another one within ± {margin:g}: yes, no, or open where the seeds do not "
    "tell; 5 % by Holm's method over all tests of the table",
    "margin": "{quantity}: the margin within which the row is tested to equal another one",
    "published": "{quantity}: the published value, not measured here",
    "published_2sigma": "{quantity}: its published 2 sigma",
    "published_difference": "{quantity}: what is published, the row's minus that of the baseline",
    "published_equivalent": "{quantity}: what is published, the row's minus that of the row that it is tested to equal",
    "by_formula": "{quantity}: the paper's formula, evaluated by us",
}
PUBLISHED = ("published", "published_2sigma", "published_difference", "published_equivalent", "by_formula")
NUMBERS = {name: (quantity, "mean") for name, quantity in QUANTITIES.items()} | {
    f"{name}_{statistic}": (quantity, statistic) for name, quantity in QUANTITIES.items() for statistic in STATISTICS
}


@dataclass(frozen=True)
class Column:
    """A column: a statistic of a quantity over seeds, of one variant or of all; of labels both are None."""

    name: str
    variant: str | None = None
    quantity: Quantity | None = None
    statistic: str | None = None

    @property
    def of_runs(self) -> bool:
        """Whether it needs the quantity of every run."""
        return self.quantity is not None and self.statistic not in PUBLISHED

    @property
    def published_name(self) -> str:
        """The quantity's name in the papers' files."""
        return self.quantity.name if self.variant is None else f"{self.variant}_{self.quantity.name}"


def parse_column(
    name: str,
    labels: Iterable[str] = (),
    variants: Iterable[str] = (),
    baseline: str | None = None,
    margins: Mapping[str, float] | None = None,
) -> Column:
    """Return the column of this name in a table with these labels, variants, baseline row and margins.

    Raises ValueError with the nearest known name, or for a comparison without a baseline or margin.
    """
    if name in labels or name in LABELS:
        return Column(name)
    variant = next((variant for variant in variants if name.startswith(f"{variant}_")), None)
    rest = name if variant is None else name.removeprefix(f"{variant}_")
    if rest not in NUMBERS:
        close = did_you_mean(rest, [*LABELS, *labels, *NUMBERS]).removeprefix("; ")
        raise ValueError(f"{close} expected a label or <quantity>_<statistic>, see results/HOWTO.md".lstrip())
    quantity, statistic = NUMBERS[rest]
    if statistic in ("difference", "speedup") and baseline is None:
        raise ValueError("differences and speed-ups need a baseline, the row to compare with")
    if statistic in ("equivalent", "margin") and quantity.name not in (margins or {}):
        raise ValueError(f"it needs margins.{quantity.name}: how far apart rows may be to count as equal")
    return Column(name, variant, quantity, statistic)
