"""The quantities of finished runs that tables show, and their columns.

A column is a label, or `[<variant>_]<quantity>[_<statistic>]`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from common.arguments import did_you_mean
from common.experiments.derived import ASSUMED, predicted_step_ms, steps_to_target
from common.experiments.runs import FinishedRun, RunError
from common.topology import build


@dataclass(frozen=True)
class Quantity:
    """One number of a run.

    name:         as tables' columns use it
    definition:   what `of` computes
    style:        its format for reading
    of:           computes it; raises RunError for a run without such a number, returns None where it is optional
    of_test_set:  whether it needs translations of the test set, which transformer.evaluate makes after training
    higher_is_better: else lower is; NaN, for a run without a finite number, is the worst
    absent:       text for runs without it; if it is set, a column for which no run has a number is left out
    """

    name: str
    definition: str
    style: str
    of: Callable[[FinishedRun], float | None]
    of_test_set: bool = False
    higher_is_better: bool = False
    absent: str | None = None

    def number_of(self, run: FinishedRun) -> float | None:
        """Return what `of` returns, and None also for a run without such a number."""
        try:
            return self.of(run)
        except RunError:
            return None


def _train_loss(run: FinishedRun) -> float:
    if "train_loss" in run.metrics:
        return run.last("validation", "train_loss")
    rows = run.curve("train", "loss").join(run.curve("train", "epoch")["epoch"])
    return float(rows["loss"][rows["epoch"] > rows["epoch"].iloc[-1] - 1].mean(skipna=False))


def _recorded(key: str) -> Callable[[FinishedRun], float | None]:
    """Return the quantity that reads a total which older runs lack."""
    return lambda run: None if run.summary.get(key) is None else run.total(key)


def _translation(score: str) -> Callable[[FinishedRun], float | None]:
    """Return the quantity that reads a score of the last model's translations from what transformer.evaluate wrote."""

    def of(run: FinishedRun) -> float | None:
        rows = run.test_scores()
        if rows is None or score not in rows:
            return None
        try:
            return float(rows.loc["last", score])
        except (ValueError, KeyError) as error:
            raise RunError(f"{run.folder}: evaluation/test.csv: no {score!r} of the last model ({error!r})") from None

    return of


def _noise_ratio(name: str) -> Callable[[FinishedRun], float | None]:
    """Return the quantity that reads a batch's ratio to the gradient noise scale, which not every run measures."""

    def of(run: FinishedRun) -> float | None:
        if name not in run.metrics:
            return None
        values = run.metrics[name][run.metrics["step"] > run.total("steps") / 2].dropna()
        return float(values.median()) if len(values) else None

    return of


def _clipped_fraction(run: FinishedRun) -> float | None:
    if "clipped_fraction" not in run.metrics:
        return None  # it does not clip
    rows = run.curve("train", "clipped_fraction")
    return float(np.average(rows["clipped_fraction"], weights=np.diff(rows["step"], prepend=0)))


def _decay_sum(run: FinishedRun) -> float:
    if "decay_sum" in run.summary:
        return run.total("decay_sum")
    rows, steps = run.curve("train", "lr"), np.arange(1, run.total("steps") + 1)
    return run.setting("optimizer.weight_decay") * float(np.interp(steps, rows["step"], rows["lr"]).sum())


def _spectral_gap(run: FinishedRun) -> float:
    try:
        workers, topology = run.config["workers"], dict(run.config["topology"])
        return build(topology.pop("name"), workers["count"], workers["per_host"], **topology).spectral_gap()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{run.folder}: config.yaml: no topology can be made of it ({error!r})") from None


def _last(metric: str, optional: bool = False) -> Callable[[FinishedRun], float | None]:
    """Return the quantity that reads a metric of the last validation."""
    return lambda run: None if optional and metric not in run.metrics else run.last("validation", metric)


DEFINITIONS = {
    "accuracy": "final validation accuracy of the averaged model in percent",
    "top1": "final top-1 validation accuracy of the averaged model in percent",
    "top5": "final top-5 validation accuracy of the averaged model in percent",
    "local_top1": "final top-1 validation accuracy in percent of the workers' own models: each evaluates its shard "
    "with its own BatchNorm statistics, and the counts are added",
    "local_top5": "final top-5 validation accuracy in percent of the workers' own models, as for local_top1",
    "train_loss": "training loss of the last epoch: mean of the training rows of metrics.jsonl less than an epoch "
    "before the last one; for language models: loss of the averaged model on windows of the training split, at the "
    "last evaluation",
    "validation_loss": "final validation loss of the averaged model in nats (language models: per token), unsmoothed",
    "unigram_entropy": "entropy in nats of the corpus's token frequencies: the loss of the best model that ignores "
    "context",
    "bleu": "final sacreBLEU of the averaged model's translations of the validation set",
    "meteor": "final METEOR by nltk (not METEOR 1.5) of the averaged model's translations of the validation set; "
    "empty where WordNet was missing",
    "test_paper_bleu": "BLEU as the paper's code computes it: the last model's greedy translations of the test set "
    "against truncated references, both in Moses tokens; not sacreBLEU",
    "test_paper_meteor": "METEOR by nltk (not METEOR 1.5) of the same lines as test_paper_bleu",
    "consensus_distance": "sqrt(mean_i ||x_i - x_bar||^2) over the workers at the last evaluation",
    "learning_rate": "base learning rate of the schedule: optimizer.lr of the run",
    "half_life_first": "samples (language models: tokens) after which a gradient weighs half as much in the first "
    "moment or momentum; empty for runs that do not record it",
    "half_life_second": "the same for the second moment",
    "clipped_fraction": "share of all workers' steps in which the gradient norm before clipping exceeded "
    "training.clip; empty without clipping",
    "decay_sum": "learning rate x weight decay, summed over the steps (if not recorded: from the rates in "
    "metrics.jsonl); AdamW's decay alone would multiply the weights by exp(-sum)",
    "spectral_gap": "spectral gap of the topology per round: 1 - |lambda_2(W)|; 1 - |lambda_2(W(p-1)...W(0))|^(1/p) "
    "for a schedule of p rounds, so 1 if it averages exactly; 1 - sqrt(lambda_2(E[W^T W])) for random "
    "matchings; 1 for all-reduce",
    "bytes_per_step": "bytes that one worker sends per step: bytes_sent / steps / workers",
    "time_step_ms": "wall-clock time of a step in ms, median over at most the last 1000 steps of a run",
    "steps_to_target": "steps until the first evaluation that reached the table's target; inf if none did",
    "hours": "steps times the median wall-clock time of a step, in hours, without evaluation and checkpoints",
    "predicted_step_ms": "predicted, not measured: time of a step in ms by the runtime model (common.planner) on the "
    f"run's hosts and workers, with {ASSUMED}",
    "local_over_noise": "a worker's batch divided by the gradient noise scale, smoothed (common.noise_scale); median "
    "over the second half of the run",
    "global_over_noise": "the batch of all workers divided by the gradient noise scale, smoothed (common.noise_scale); "
    "median over the second half of the run",
}
# The format for readers, and the function that computes the quantity.
OF: dict[str, tuple[str, Callable[[FinishedRun], float | None]]] = {
    "accuracy": (".2f", _last("accuracy")),
    "top1": (".2f", _last("accuracy")),
    "top5": (".2f", _last("accuracy_top5")),
    "local_top1": (".2f", _last("local_accuracy")),
    "local_top5": (".2f", _last("local_accuracy_top5")),
    "train_loss": (".4f", _train_loss),
    "validation_loss": (".4f", _last("loss")),
    "unigram_entropy": (".4f", _last("unigram_entropy")),
    "bleu": (".2f", _last("bleu")),
    "meteor": (".4f", _last("meteor", optional=True)),  # it needs WordNet, which not every machine has
    "test_paper_bleu": (".2f", _translation("paper_bleu")),
    "test_paper_meteor": (".4f", _translation("paper_meteor")),
    "consensus_distance": (".3g", _last("consensus_distance")),
    "learning_rate": (".3g", lambda run: float(run.setting("optimizer.lr"))),
    "half_life_first": (".3g", _recorded("half_life_first")),
    "half_life_second": (".3g", _recorded("half_life_second")),
    "clipped_fraction": (".2f", _clipped_fraction),
    "decay_sum": (".2f", _decay_sum),
    "spectral_gap": (".4f", _spectral_gap),
    "bytes_per_step": (",.0f", lambda run: run.total("bytes_sent") / run.total("steps") / run.total("workers")),
    "time_step_ms": (".2f", lambda run: run.total("time_step_ms")),
    "steps_to_target": (".0f", steps_to_target),
    "hours": (".1f", lambda run: run.total("time_step_ms") * run.total("steps") / 3.6e6),
    "predicted_step_ms": (".1f", predicted_step_ms),
    "local_over_noise": (".3g", _noise_ratio("local_over_noise")),
    "global_over_noise": (".3g", _noise_ratio("global_over_noise")),
}
HIGHER = {"accuracy", "top1", "top5", "local_top1", "local_top5", "bleu", "meteor"}
HIGHER |= {"test_paper_bleu", "test_paper_meteor"}
ABSENT = {"clipped_fraction": "not clipped"}
ABSENT |= dict.fromkeys(("local_over_noise", "global_over_noise"), "not recorded")
QUANTITIES = {
    name: Quantity(name, DEFINITIONS[name], *of, name.startswith("test_"), name in HIGHER, ABSENT.get(name))
    for name, of in OF.items()
}

# Columns.

LABELS = {
    "method": "training method: how workers communicate, and the optimizer",
    "topology": "who exchanges with whom",
    "workers": "number of workers",
    "seeds": "number of finished seeds: the n of every mean and deviation in the row",
}
STATISTICS = {  # with their definitions, as pages show them
    "mean": "{what}; mean over seeds",
    "2sigma": "{what}; 2 x sample standard deviation over seeds (n - 1; empty for one seed)",
    "median": "{what}; median over seeds",
    "lowest": "{what}; lowest over seeds",
    "highest": "{what}; highest over seeds",
    "reached": "{quantity}: number of runs in which it is finite",
    "difference": "{quantity}: this row minus the baseline, {baseline}; mean of the differences seed by seed "
    "[95 % t interval, not corrected for the number of comparisons]",
    "speedup": "{quantity}: the baseline, {baseline}, divided by this row; geometric mean of the ratios seed by seed "
    "[95 % t interval, computed from their logarithms]",
    "equivalent": "whether the row equals another one within ± {margin:g}: yes, no, or open if the seeds do "
    "not decide it; 5 % level over all tests of the table, by Holm's method",
    "margin": "{quantity}: the margin of the equivalence test",
    "published": "{quantity}: the published value, not measured here",
    "published_2sigma": "{quantity}: its published 2 sigma",
    "published_difference": "{quantity}: the published difference, this row minus the baseline",
    "published_equivalent": "{quantity}: the published difference, this row minus the row that it is tested against",
    "by_formula": "{quantity}: the paper's formula, evaluated by us",
}
PUBLISHED = ("published", "published_2sigma", "published_difference", "published_equivalent", "by_formula")
NUMBERS = {name: (quantity, "mean") for name, quantity in QUANTITIES.items()} | {
    f"{name}_{statistic}": (quantity, statistic) for name, quantity in QUANTITIES.items() for statistic in STATISTICS
}


@dataclass(frozen=True)
class Column:
    """A column: a statistic of a quantity over seeds, of one variant or of all; for labels both are None."""

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
        """The quantity's name, with the variant's as a prefix, as in the papers' files."""
        return self.quantity.name if self.variant is None else f"{self.variant}_{self.quantity.name}"


def parse_column(
    name: str, labels: Iterable[str], variants: Iterable[str], baseline: str | None, margins: Mapping[str, float] | None
) -> Column:
    """Return the column of this name in a table with these labels, variants, baseline row and margins.

    Raises ValueError with the nearest known name, for several meanings, or a comparison without a baseline or margin.
    """
    if name in labels or name in LABELS:
        return Column(name)
    rests = {None: name} | {v: name.removeprefix(f"{v}_") for v in variants if name.startswith(f"{v}_")}
    known = [variant for variant, rest in rests.items() if rest in NUMBERS]
    if not known:
        close = did_you_mean(min(rests.values(), key=len), [*LABELS, *labels, *NUMBERS]).removeprefix("; ")
        raise ValueError(f"{close} expected a label or <quantity>_<statistic>, see results/HOWTO.md".lstrip())
    if len(known) > 1:
        meanings = " or ".join(rests[each] + f" of {each}" * bool(each) for each in known)
        raise ValueError(f"it means {meanings}; expected a variant with another name")
    quantity, statistic = NUMBERS[rests[known[0]]]
    if statistic in ("difference", "speedup") and baseline is None:
        raise ValueError("differences and speed-ups need a baseline, the row to compare with")
    if statistic in ("equivalent", "margin") and quantity.name not in (margins or {}):
        raise ValueError(f"it needs margins.{quantity.name}: how far apart rows may be to count as equal")
    return Column(name, known[0], quantity, statistic)
