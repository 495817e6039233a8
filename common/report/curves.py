"""Learning curves: of a table's runs, of some rows or variants, and of runs below published curves."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from common.experiments.collect import Collection
from common.experiments.derived import ASSUMED_SHORT, is_simulated, seconds_until
from common.experiments.runs import FinishedRun, RunError
from common.experiments.tables import Table
from common.report.published import load_published
from common.report.style import draw_legends, label_of, line_names, looks, seeds_of

logger = logging.getLogger(__name__)

# (split, name) in a run; scores of the split "test" are not recorded in training, but by transformer.evaluate
RECORDED_AS = {
    "validation_loss": ("validation", "loss"),
    "validation_loss_smoothed": ("validation", "loss_smoothed"),
    "train_loss": ("train", "loss"),
    "test_paper_bleu": ("test", "paper_bleu"),
    "test_paper_meteor": ("test", "paper_meteor"),
}
MARKERS_PER_CURVE = 8
LINE = ["method", "topology"]  # the columns that tell curves apart


@dataclass(frozen=True)
class Panel:
    """Curves as `curves` returns them, against one of their columns; `level` is drawn as a line."""

    data: pd.DataFrame
    x: str
    xlabel: str
    ylabel: str
    title: str = ""
    level: float | None = None


def draw_table(collection: Collection) -> Figure:
    """Draw training loss and validation metric (rows) against steps, bytes sent and time (columns): 2 x 3 panels.

    A line is the mean over seeds, its band goes from the lowest to the highest seed. Vertical lines are at the steps
    where workers left or joined in any of them. Rows of one method and topology are told apart by their labels.
    """
    table = collection.table
    names = zip(table.rows, line_names(table.rows), strict=True)
    rows = tuple(row.model_copy(update={"method": name}) for row, name in names)
    collection = replace(collection, table=table.model_copy(update={"rows": rows}))
    xs = {"step": "step", "sent_mb": "sent per worker (MB)", "time_s": time_label(collection.all_runs)}
    loss, metric = (curves(collection, name) for name in ("train_loss", table.metric))
    panels = [
        [Panel(data, x, label, label_of(name)) for x, label in xs.items()]
        for data, name in ((loss, "train_loss"), (metric, table.metric))
    ]
    figure = draw_panels(panels, collection.table, (9.6, 5.6), sharex="col", sharey="row")
    changes = {step for run in collection.all_runs for step in run.metrics.query("split == 'membership'")["step"]}
    for ax, step in product(figure.axes[::3], changes):
        ax.axvline(step, color="0.5", linewidth=0.8, linestyle=":")
    losses, sent = loss["value"], metric.groupby(LINE)["sent_mb"].max()
    if 0 < losses.min() * 10 < losses.max():  # else the ends of all curves coincide
        figure.axes[0].set_yscale("log")
        figure.axes[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if 0 < sent.min() * 10 < sent.max():  # as with local steps
        figure.axes[1].set_xscale("log")
        figure.axes[1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    seeds = seeds_of(pd.concat([loss, metric]).groupby(LINE)["run"].nunique())
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; band: lowest to highest)")
    return figure


def draw_below_published(collection: Collection, name: str, metrics: dict[str, str]) -> Figure:
    """Draw published curves, and below them those of the collection, if it has runs: {published metric: ours}."""
    table, paper, runs = collection.table, load_published(name), collection.all_runs
    rows = pd.DataFrame([{"method": r.method.lower(), "topology": r.topology, "name": r.method} for r in table.rows])
    theirs = paper.read_curves().merge(rows, on=LINE)
    theirs = theirs.assign(method=theirs["name"], step=theirs["epoch"])
    panels = [[], []] if runs else [[]]
    for published, ours in metrics.items():
        data, ylabel = theirs.assign(value=theirs[published]), paper.axes.get(published, published)
        level = paper.reference_bleu if published == "bleu" else None
        panels[0].append(Panel(data, "time_ks", "time (ks)", ylabel, "published (digitised)", level))
        if runs:
            title = "ours, the proxy" if table.proxy_of else "ours"
            panels[1].append(Panel(curves(collection, ours), "time_s", time_label(runs), label_of(ours), title))
    figure = draw_panels(panels, table, (3.7 * len(metrics), 0.9 + 2.5 * len(panels)))
    figure.suptitle(table.title if runs else f"{table.title} (no finished runs of ours)")
    return figure


def draw_panels(panels: Sequence[Sequence[Panel]], table: Table, size: tuple[float, float], **shared: object) -> Figure:
    """Draw rows of panels with curves of methods (colours) and topologies (styles), in the order of the table."""
    methods, topologies = (list(dict.fromkeys(getattr(row, key) for row in table.rows)) for key in LINE)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(panels[0]), squeeze=False, **shared)
    for panel, ax in zip((panel for row in panels for panel in row), axes.flat, strict=True):
        data = panel.data.dropna(subset="value")
        if data.empty:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="0.4")
        else:
            look = looks(methods, topologies)
            look["markevery"] = max(1, data.groupby(LINE)["step"].nunique().max() // MARKERS_PER_CURVE)
            look |= {"errorbar": ("pi", 100), "err_kws": {"alpha": 0.12, "linewidth": 0}, "legend": False}
            sns.lineplot(data=data, x=panel.x, y="value", hue="method", style="topology", **look, ax=ax)
            ax.xaxis.set_major_locator(MaxNLocator(5))
        if panel.level is not None:
            ax.axhline(panel.level, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)))
        ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
        if shared:
            ax.label_outer()
    figure.align_ylabels(axes)
    draw_legends(figure, methods, topologies)
    return figure


def curves(collection: Collection, metric: str) -> pd.DataFrame:
    """Return the curves of all rows in long form.

    The columns are method, topology, run, step, sent_mb (MB sent per worker until then), time_s and value. Bytes and
    time are means over seeds, because a mean over seeds needs one abscissa. A run that cannot be drawn is named in a
    warning and left out. Once a seed has diverged, its row has no values: the mean of the others would be misleading.
    """
    parts = [pd.DataFrame(columns=[*LINE, "run", "step", "sent_mb", "time_s", "value"])]
    for row in collection.table.rows:
        drawn = [_curve(run, metric) for run in collection.runs[row.name]]
        runs = [frame for frame in drawn if frame is not None]
        if runs:
            frame = pd.concat(runs, ignore_index=True)
            for x in ("sent_mb", "time_s"):
                frame[x] = frame.groupby("step")[x].transform("mean")
            diverged = (~np.isfinite(frame["value"])).groupby(frame["step"]).transform("any")
            frame["value"] = frame["value"].mask(diverged)
            parts.append(frame.assign(method=row.method, topology=row.topology))
    return pd.concat(parts[1:] or parts, ignore_index=True)


def _curve(run: FinishedRun, metric: str) -> pd.DataFrame | None:
    """Return a run's curve, None if it cannot be drawn; bytes and time are those that the training rows count."""
    split, name = recorded_as(metric)
    try:
        recorded = run.test_curve(name) if split == "test" else run.curve(split, name)
        frame = recorded.rename(columns={name: "value"}).assign(run=str(run.folder))
        sent = run.curve("train", "bytes_sent").dropna()
        steps, megabytes = sent["step"].to_numpy(), sent["bytes_sent"].to_numpy() / run.total("workers") / 1e6
        frame["sent_mb"] = np.interp(frame["step"], [0, *steps], [0, *megabytes])
        frame["time_s"] = seconds_until(run, frame["step"])
    except RunError as error:
        logger.warning("left out of the curves of %s: %s", metric, error)
        return None
    diverged = frame["step"][~np.isfinite(frame["value"])]
    if not diverged.empty:
        first = diverged.iloc[0]
        logger.warning("%s: %s is not finite from step %d on: its row's curve ends there", run.folder, metric, first)
    return frame


def recorded_as(metric: str) -> tuple[str, str]:
    """Return the split and the name under which a run records a metric."""
    return RECORDED_AS.get(metric, ("validation", metric))


def time_label(runs: Sequence[FinishedRun]) -> str:
    """Return the name of the time axis: measured for processes; for simulated workers predicted, of another model."""
    kinds = sorted({f"predicted for\n{ASSUMED_SHORT}" if is_simulated(run) else "measured" for run in runs})
    return ", ".join(["time (s)", *([" or ".join(kinds)] if kinds else [])])
