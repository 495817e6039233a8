"""The quantities that tables show of finished runs, each with its definition and how it is computed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from common.experiments.derived import ASSUMED, predicted_step_ms, steps_to_target
from common.experiments.runs import FinishedRun, RunError
from common.topology import build

NOISE_KINDS = ("", "_preconditioned")  # as common.noise_scale, which brings torch, has them


@dataclass(frozen=True)
class Quantity:
    """One number of a run.

    name:         as tables' columns use it
    definition:   what `of` computes
    style:        its format for reading
    of:           compute it; RunError for a run without such a number, None where a run may do without it
    of_test_set:  whether it needs translations of the test set, which transformer.evaluate makes after training
    higher_is_better: else lower; of a run without a finite number, NaN, it is the worst
    absent:       what readers see of runs without it; a column that no run has a number for is left out then
    """

    name: str
    definition: str
    style: str
    of: Callable[[FinishedRun], float | None]
    of_test_set: bool = False
    higher_is_better: bool = False
    absent: str | None = None


def _train_loss(run: FinishedRun) -> float:
    if "train_loss" in run.metrics:
        return run.last("validation", "train_loss")
    rows = run.curve("train", "loss").join(run.curve("train", "epoch")["epoch"])
    return float(rows["loss"][rows["epoch"] > rows["epoch"].iloc[-1] - 1].mean(skipna=False))


def _recorded(key: str) -> Callable[[FinishedRun], float | None]:
    """Return the quantity that reads a total which older runs lack."""
    return lambda run: None if run.summary.get(key) is None else run.total(key)


def _meteor(run: FinishedRun) -> float | None:
    try:
        return run.last("validation", "meteor")
    except RunError:
        return None  # it needs WordNet, which not every machine has


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


def _of_noise(name: str, what: str) -> Quantity:
    """Return a metric of the gradient noise, which some training or validation rows have since it is measured."""

    def of(run: FinishedRun) -> float | None:
        if name not in run.metrics:
            return None
        values = run.metrics[name][run.metrics["step"] > run.total("steps") / 2].dropna()
        return float(values.median()) if len(values) else None

    definition = f"{what}; median over the second half of the run, smoothed (common.noise_scale)"
    return Quantity(name, definition, ".3g", of, absent="not recorded")


def _noise_quantities() -> Iterator[Quantity]:
    for ending in NOISE_KINDS:
        how = " of gradients divided by the root of Adam's second moment" if ending else ""
        yield _of_noise(f"noise_scale{ending}", f"gradient noise scale{how} in samples, of language models tokens")
        yield _of_noise(f"local_over_noise{ending}", f"a worker's batch over the gradient noise scale{how}")
        yield _of_noise(f"global_over_noise{ending}", f"the batch of all workers over the gradient noise scale{how}")


def _clipped_fraction(run: FinishedRun) -> float | None:
    if "clipped_fraction" not in run.metrics:
        return None  # it does not clip
    rows = run.curve("train", "clipped_fraction")
    return float(np.average(rows["clipped_fraction"], weights=np.diff(rows["step"], prepend=0)))


def _decay_sum(run: FinishedRun) -> float:
    if "decay_sum" in run.summary:
        return run.total("decay_sum")
    rows, steps = run.curve("train", "lr"), np.arange(1, run.total("steps") + 1)
    return run.config["optimizer"]["weight_decay"] * float(np.interp(steps, rows["step"], rows["lr"]).sum())


def _spectral_gap(run: FinishedRun) -> float:
    try:
        workers, topology = run.config["workers"], dict(run.config["topology"])
        return build(topology.pop("name"), workers["count"], workers["per_host"], **topology).spectral_gap()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{run.folder}: config.yaml: no topology can be made of it ({error!r})") from None


def _last(name: str, metric: str, definition: str, style: str = ".2f", higher: bool = False) -> Quantity:
    """Return the quantity that reads a metric of the last validation."""
    return Quantity(name, definition, style, lambda run: run.last("validation", metric), higher_is_better=higher)


_ALL = (
    _last("accuracy", "accuracy", "final validation accuracy of the averaged model in percent", higher=True),
    _last("top1", "accuracy", "final top-1 validation accuracy of the averaged model in percent", higher=True),
    _last("top5", "accuracy_top5", "final top-5 validation accuracy of the averaged model in percent", higher=True),
    _last(
        "local_top1",
        "local_accuracy",
        "final top-1 validation accuracy in percent of the workers' own models, each with its own BatchNorm "
        "statistics on its own shard, counts added",
        higher=True,
    ),
    _last(
        "local_top5",
        "local_accuracy_top5",
        "final top-5 validation accuracy in percent of the workers' own models, as local_top1",
        higher=True,
    ),
    Quantity(
        "train_loss",
        "training loss of the last epoch: mean of the training rows of metrics.jsonl less than an epoch before the "
        "last one; of language models that of the averaged model at the last evaluation, on windows of the training "
        "split",
        ".4f",
        _train_loss,
    ),
    _last(
        "validation_loss",
        "loss",
        "final validation loss of the averaged model, not smoothed (in nats: language models per token)",
        ".4f",
    ),
    _last(
        "unigram_entropy",
        "unigram_entropy",
        "entropy in nats of the corpus's token frequencies: the loss of the best model that ignores context",
        ".4f",
    ),
    _last("bleu", "bleu", "final sacreBLEU of the averaged model's translations of the validation set", higher=True),
    Quantity(
        "meteor",
        "final METEOR by nltk (not METEOR 1.5) of the averaged model's translations of the validation set; empty where "
        "WordNet was missing",
        ".4f",
        _meteor,
        higher_is_better=True,
    ),
    Quantity(
        "test_paper_bleu",
        "BLEU as the paper's code computes it, of the last model's greedy translations of the test set and of cut "
        "references, both in Moses tokens; not sacreBLEU",
        ".2f",
        _translation("paper_bleu"),
        of_test_set=True,
        higher_is_better=True,
    ),
    Quantity(
        "test_paper_meteor",
        "METEOR by nltk (not METEOR 1.5) of the lines of test_paper_bleu",
        ".4f",
        _translation("paper_meteor"),
        of_test_set=True,
        higher_is_better=True,
    ),
    _last(
        "consensus_distance",
        "consensus_distance",
        "sqrt(mean_i ||x_i - x_bar||^2) over the workers at the last evaluation",
        ".3g",
    ),
    Quantity(
        "learning_rate",
        "the learning rate that the schedule starts from: optimizer.lr of the run",
        ".3g",
        lambda run: float(run.config["optimizer"]["lr"]),
    ),
    Quantity(
        "half_life_first",
        "samples (of language models: tokens) after which a gradient weighs half as much in the first moment or "
        "momentum; empty for runs that do not record it",
        ".3g",
        _recorded("half_life_first"),
    ),
    Quantity("half_life_second", "the same in the second moment", ".3g", _recorded("half_life_second")),
    Quantity(
        "clipped_fraction",
        "share of the steps, over all workers, whose gradient's norm before clipping exceeded training.clip; empty "
        "where nothing is clipped",
        ".2f",
        _clipped_fraction,
        absent="not clipped",
    ),
    Quantity(
        "decay_sum",
        "learning rate x weight decay, summed over the steps (of runs that do not record it, from the rates in "
        "metrics.jsonl): AdamW's decay alone would shrink weights by exp(-sum)",
        ".2f",
        _decay_sum,
    ),
    Quantity(
        "spectral_gap",
        "spectral gap of the topology per round: 1 - |lambda_2(W)|; 1 - |lambda_2(W(p-1)...W(0))|^(1/p) for a "
        "schedule of p rounds, so 1 for one that averages exactly; 1 - sqrt(lambda_2(E[W^T W])) for random "
        "matchings; 1 for all-reduce",
        ".4f",
        _spectral_gap,
    ),
    Quantity(
        "bytes_per_step",
        "bytes that one worker hands to the network per step: bytes_sent / steps / workers",
        ",.0f",
        lambda run: run.total("bytes_sent") / run.total("steps") / run.total("workers"),
    ),
    Quantity(
        "time_step_ms",
        "wall-clock time of a step in ms, median over the steps of a run",
        ".2f",
        lambda run: run.total("time_step_ms"),
    ),
    Quantity(
        "steps_to_target",
        "steps until the first evaluation that reached the table's target; inf if none did",
        ".0f",
        steps_to_target,
    ),
    Quantity(
        "hours",
        "steps times the median wall-clock time of a step, in hours: without evaluation and checkpoints",
        ".1f",
        lambda run: run.total("time_step_ms") * run.total("steps") / 3.6e6,
    ),
    Quantity(
        "predicted_step_ms",
        f"predicted, not measured: time of a step in ms by the runtime model (common.planner) on the run's hosts and "
        f"workers, with {ASSUMED}",
        ".1f",
        predicted_step_ms,
    ),
)

QUANTITIES = {quantity.name: quantity for quantity in (*_ALL, *_noise_quantities())}
