"""What a table's columns mean: each quantity is defined once, in words and in code."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from common.cli import nearest
from common.report.prediction import ASSUMED, predicted_step_ms
from common.report.published import Published
from common.report.runs import Run, RunError
from common.report.significance import welch
from common.topology import build

LABELS = {
    "method": "what is trained: the gradient exchange and the optimizer",
    "topology": "who exchanges with whom",
    "workers": "number of workers",
    "seeds": "number of finished seeds: the n of every mean and deviation in the row",
}


@dataclass(frozen=True)
class Quantity:
    """One number of a run: `of(run)` computes it as `definition` says; `style` is its format in Markdown.

    `of` raises RunError for a run that has no such number, or returns None where a run may do without.
    """

    definition: str
    style: str
    of: Callable[[Run], float | None]


@dataclass(frozen=True)
class Statistic:
    """How the seeds of a row become one number; None where there are too few of them."""

    definition: str
    of: Callable[[Sequence[float]], float | None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _two_sigma(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return 2 * statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _train_loss(run: Run) -> float:
    if "train_loss" in run.metrics:
        return run.last("validation", "train_loss")
    rows = run.curve("train", "loss").join(run.curve("train", "epoch")["epoch"])
    return float(rows["loss"][rows["epoch"] > rows["epoch"].iloc[-1] - 1].mean(skipna=False))


def _meteor(run: Run) -> float | None:
    try:
        return run.last("validation", "meteor")
    except RunError:
        return None  # it needs WordNet, which not every machine has


def _translation(score: str) -> Callable[[Run], float | None]:
    """A score of the last model's translations of the test set, which transformer.evaluate writes."""

    def of(run: Run) -> float | None:
        path = run.folder / "evaluation" / "test.csv"
        if not path.exists():
            return None
        try:
            rows = pd.read_csv(path).set_index("model")
            return float(rows.loc["last", score]) if score in rows else None
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{run.folder}: evaluation/test.csv: no {score!r} of the last model ({error!r})") from None

    return of


def _spectral_gap(run: Run) -> float:
    try:
        workers, topology = run.config["workers"], dict(run.config["topology"])
        return build(topology.pop("name"), workers["count"], workers["per_host"], **topology).spectral_gap()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{run.folder}: config.yaml: no topology can be made of it ({error!r})") from None


QUANTITIES = {
    "accuracy": Quantity(
        "final validation accuracy of the averaged model in percent",
        ".2f",
        lambda run: run.last("validation", "accuracy"),
    ),
    "top1": Quantity(
        "final top-1 validation accuracy of the averaged model in percent",
        ".2f",
        lambda run: run.last("validation", "accuracy"),
    ),
    "top5": Quantity(
        "final top-5 validation accuracy of the averaged model in percent",
        ".2f",
        lambda run: run.last("validation", "accuracy_top5"),
    ),
    "local_top1": Quantity(
        "final top-1 validation accuracy in percent of the workers' own models, each with its own BatchNorm "
        "statistics on its own shard, counts added",
        ".2f",
        lambda run: run.last("validation", "local_accuracy"),
    ),
    "local_top5": Quantity(
        "final top-5 validation accuracy in percent of the workers' own models, as local_top1",
        ".2f",
        lambda run: run.last("validation", "local_accuracy_top5"),
    ),
    "train_loss": Quantity(
        "training loss of the last epoch: mean of the training rows of metrics.jsonl less than an epoch before the "
        "last one; of language models that of the averaged model at the last evaluation, on fixed training windows",
        ".4f",
        _train_loss,
    ),
    "validation_loss": Quantity(
        "final validation loss of the averaged model, not smoothed (in nats: language models per token)",
        ".4f",
        lambda run: run.last("validation", "loss"),
    ),
    "unigram_entropy": Quantity(
        "entropy in nats of the corpus's token frequencies: the loss of the best model that ignores context",
        ".4f",
        lambda run: run.last("validation", "unigram_entropy"),
    ),
    "bleu": Quantity(
        "final sacreBLEU of the averaged model's translations of the validation set",
        ".2f",
        lambda run: run.last("validation", "bleu"),
    ),
    "meteor": Quantity(
        "final METEOR by nltk (not METEOR 1.5) of the averaged model's translations of the validation set; empty where "
        "WordNet was missing",
        ".4f",
        _meteor,
    ),
    "test_bleu": Quantity(
        "sacreBLEU of the last model's translations of the test set; empty until transformer.evaluate has made them",
        ".2f",
        _translation("bleu"),
    ),
    "test_paper_bleu": Quantity(
        "BLEU of the same as the paper's code computes it, of cut references in Moses tokens; not sacreBLEU",
        ".2f",
        _translation("paper_bleu"),
    ),
    "test_paper_meteor": Quantity(
        "METEOR by nltk (not METEOR 1.5) of the lines of test_paper_bleu", ".4f", _translation("paper_meteor")
    ),
    "consensus_distance": Quantity(
        "sqrt(mean_i ||x_i - x_bar||^2) over the workers at the last evaluation",
        ".3g",
        lambda run: run.last("validation", "consensus_distance"),
    ),
    "spectral_gap": Quantity(
        "spectral gap of the topology per round: 1 - |lambda_2(W)|; 1 - |lambda_2(W(p-1)...W(0))|^(1/p) for a "
        "schedule of p rounds, so 1 for one that averages exactly; 1 - sqrt(lambda_2(E[W^T W])) for random "
        "matchings; 1 for all-reduce",
        ".4f",
        _spectral_gap,
    ),
    "bytes_per_step": Quantity(
        "bytes that one worker hands to the network per step: bytes_sent / steps / workers",
        ",.0f",
        lambda run: run.total("bytes_sent") / run.total("steps") / run.total("workers"),
    ),
    "time_step_ms": Quantity(
        "wall-clock time of a step in ms, median over the steps of a run",
        ".2f",
        lambda run: run.total("time_step_ms"),
    ),
    "hours": Quantity(
        "steps times the median wall-clock time of a step, in hours: without evaluation and checkpoints",
        ".1f",
        lambda run: run.total("time_step_ms") * run.total("steps") / 3.6e6,
    ),
    "predicted_step_ms": Quantity(
        f"predicted, not measured: time of a step in ms by the runtime model (common.runtime) on the run's hosts and "
        f"workers, with {ASSUMED}",
        ".1f",
        predicted_step_ms,
    ),
}

STATISTICS = {
    "mean": Statistic("mean over seeds", _mean),
    "2sigma": Statistic("2 x sample standard deviation over seeds (n - 1; empty for one seed)", _two_sigma),
}

COMPARISONS = {
    "p_value": "p of Welch's t-test over seeds against the baseline row (two-sided, not corrected for several rows)",
    "published": "the published value, not measured here",
    "published_2sigma": "its published 2 sigma",
    "by_formula": "the paper's formula, evaluated by us",
}

DEFAULT_COLUMNS = (
    "method",
    "topology",
    "workers",
    "seeds",
    "accuracy_mean",
    "accuracy_2sigma",
    "train_loss_mean",
    "consensus_distance_mean",
    "bytes_per_step",
    "time_step_ms",
)


def split_column(column: str) -> tuple[str, str]:
    """(quantity, statistic or comparison) of `<quantity>_<kind>` or `<quantity>` (its mean); ValueError if unknown."""
    kinds = (*STATISTICS, *COMPARISONS)
    for kind in sorted(kinds, key=len, reverse=True):
        name = column.removesuffix(f"_{kind}")
        if name != column and name in QUANTITIES:
            return name, kind
    if column in QUANTITIES:
        return column, "mean"
    raise ValueError(nearest(column, [*LABELS, *QUANTITIES, *(f"{q}_{kind}" for q in QUANTITIES for kind in kinds)]))


def split_variant(column: str, variants: Iterable[str]) -> tuple[str | None, str]:
    """(variant, the rest) of `<variant>_<rest>`; (None, column) if it begins with none of the variants."""
    for variant in variants:
        if column.startswith(f"{variant}_"):
            return variant, column.removeprefix(f"{variant}_")
    return None, column


def quantities_of(columns: Sequence[str]) -> set[str]:
    """The quantities that these columns show of runs; published ones need none."""
    pairs = [split_column(column) for column in columns if column not in LABELS]
    return {quantity for quantity, kind in pairs if not kind.startswith("published")}


def values_of(quantity: str, runs: Sequence[Run]) -> list[float]:
    """A quantity of all runs; empty unless every one has it, so that n is the same for all numbers of a row."""
    values = [QUANTITIES[quantity].of(run) for run in runs]
    return [] if None in values else values


def value_of(column: str, runs: Sequence[Run]) -> float | None:
    """A column's number for the runs of one row; for columns that compare see compare."""
    quantity, statistic = split_column(column)
    return STATISTICS[statistic].of(values_of(quantity, runs))


def compare(
    column: str, runs: Sequence[Run], baseline: Sequence[Run], published: Mapping[str, Published], name: str
) -> float | None:
    """A column's number for the runs of one row, beside the baseline's runs and what is published of the row.

    name: the quantity's name in `published`, with the variant
    """
    quantity, kind = split_column(column)
    if kind == "p_value":
        return welch(values_of(quantity, runs), values_of(quantity, baseline))
    if kind in COMPARISONS:
        number = published.get(name)
        return None if number is None else number.two_sigma if kind == "published_2sigma" else number.value
    return value_of(column, runs)


def style_of(column: str) -> str:
    """The format of a column's numbers for reading."""
    quantity, kind = split_column(column)
    return ".2g" if kind == "p_value" else QUANTITIES[quantity].style


def define(column: str) -> str:
    """The definition of a column in words."""
    if column in LABELS:
        return LABELS[column]
    quantity, kind = split_column(column)
    if kind in COMPARISONS:
        return f"{quantity}: {COMPARISONS[kind]}"
    return f"{QUANTITIES[quantity].definition}; {STATISTICS[kind].definition}"


def check_column(column: str) -> str:
    """Returns the column's name; ValueError with the known ones if it is none of them."""
    if column not in LABELS:
        split_column(column)
    return column
