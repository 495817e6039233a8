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
OF_RUNS = ("mean", "2sigma", "median", "lowest", "highest", "reached")
COMPARISONS = ("difference", "speedup", "equivalent", "margin")
PUBLISHED = ("published", "published_2sigma", "published_difference", "published_equivalent", "by_formula")
NUMBERS = {name: (quantity, "mean") for name, quantity in QUANTITIES.items()} | {
    f"{name}_{statistic}": (quantity, statistic)
    for name, quantity in QUANTITIES.items()
    for statistic in (*OF_RUNS, *COMPARISONS, *PUBLISHED)
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
