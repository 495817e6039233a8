"""Learning curves: of a table's runs, of some rows or variants, and of runs below published curves."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from textwrap import fill

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from scipy.optimize import isotonic_regression

from common.experiments.collect import Collection
from common.experiments.derived import ASSUMED_SHORT, is_simulated, seconds_until
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import FinishedRun, RunError
from common.experiments.tables import Table
from common.report.published import load_published
from common.report.style import draw_legends, label_of, line_names, looks, seeds_of

logger = logging.getLogger(__name__)

# (split, name) in a run; scores of the split "test" are not recorded during training, but by transformer.evaluate
RECORDED_AS = {
    "validation_loss": ("validation", "loss"),
    "validation_loss_smoothed": ("validation", "loss_smoothed"),
    "train_loss": ("train", "loss"),
    "test_paper_bleu": ("test", "paper_bleu"),
    "test_paper_meteor": ("test", "paper_meteor"),
}
MARKERS_PER_CURVE = 8
LINE = ["method", "topology"]  # the columns that tell curves apart
MOST_NAMED = 7  # lines that are named at their ends
NAME_SIZE, NAME_WIDTH = 7, 34  # of these names, in points and characters


@dataclass(frozen=True)
class Panel:
    """Curves as `curves` returns them, against one of their columns; `level` is drawn as a line."""

    data: pd.DataFrame
    x: str
    xlabel: str
    ylabel: str
    title: str = ""
    level: float | None = None


def draw_table(collection: Collection, every: bool = False) -> Figure:
    """Draw training loss and validation metric (rows) against bytes sent, time and steps (columns): 2 x 3 panels.

    A line is the mean over seeds; its band goes from the lowest to the highest seed. Vertical lines are at the steps
    where workers left or joined in any run. Rows of one method and topology are told apart by their labels. With more
    than seven rows, only `telling_rows` are drawn; with `every`, all are drawn, and named in legends.
    """
    rows, of = collection.table.rows, ""
    if len(rows) > MOST_NAMED and not every:
        collection = collection.of_rows(telling_rows(collection), collection.table.title)
        of = f"{len(collection.table.rows)} of {len(rows)} rows, "
    table = collection.table
    names = zip(table.rows, line_names(table.rows), strict=True)
    rows = tuple(row.model_copy(update={"method": name}) for row, name in names)
    collection = replace(collection, table=table.model_copy(update={"rows": rows}))
    # Steps come last, because all lines end at the same step, next to their names.
    xs = {"sent_mb": "sent per worker (MB)", "time_s": time_label(collection.all_runs), "step": "step"}
    loss, metric = (curves(collection, name) for name in ("train_loss", table.metric))
    panels = [
        [Panel(data, x, label, label_of(name)) for x, label in xs.items()]
        for data, name in ((loss, "train_loss"), (metric, table.metric))
    ]
    named = len(rows) <= MOST_NAMED
    figure = draw_panels(panels, collection.table, (11.4 if named else 9.6, 5.6), sharex="col", sharey="row")
    changes = {step for run in collection.all_runs for step in run.metrics.query("split == 'membership'")["step"]}
    for ax, step in product(figure.axes[2::3], changes):
        ax.axvline(step, color="0.5", linewidth=0.8, linestyle=":")
    losses, sent = loss["value"], metric.groupby(LINE)["sent_mb"].max()
    for axis, values in ((figure.axes[0].yaxis, losses), (figure.axes[0].xaxis, sent)):
        if 0 < values.min() * 10 < values.max():  # else the losses' ends coincide; bytes: as with local steps
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if named:
        for ax, panel in zip(figure.axes[2::3], (row[-1] for row in panels), strict=True):
            name_ends(ax, panel, collection.table)
    else:
        draw_legends(figure, *_kinds(collection.table))
    seeds = seeds_of(pd.concat([loss, metric]).groupby(LINE)["run"].nunique())
    figure.suptitle(f"{table.title} ({of}mean of {seeds} seeds; band: lowest to highest)")
    return figure


def telling_rows(collection: Collection) -> list[str]:
    """Return the baseline and each method's best row by the mean final metric, at most seven, in the table's order."""
    table, quantity = collection.table, QUANTITIES[collection.table.metric]
    worst = -np.inf if quantity.higher_is_better else np.inf
    values = collection.frame[quantity.name].astype(float).fillna(worst).groupby(collection.frame["row"]).mean()
    ranked = values.sort_values(ascending=not quantity.higher_is_better, kind="stable").index
    methods = {row.name: row.method for row in table.rows}
    best = {methods[row]: row for row in reversed(ranked)}.values()
    others = [row.name for row in table.rows if row.name in best and row.name != table.baseline]
    with_baseline = {table.baseline} & {*methods}
    kept = with_baseline | {*others[: MOST_NAMED - len(with_baseline)]}
    return [row.name for row in table.rows if row.name in kept]


def name_ends(ax: Axes, panel: Panel, table: Table) -> None:
    """Write the lines' names to the right of their ends, in their colours, each joined to its end by a thin line."""
    means = panel.data.dropna(subset="value").groupby([*LINE, panel.x], sort=False)["value"].mean().reset_index()
    ends = means.sort_values(panel.x).groupby(LINE).tail(1)
    ax.get_ylim()  # settles the limits on which the heights depend
    heights = (ax.transScale + ax.transLimits).transform(ends[[panel.x, "value"]].to_numpy(float))[:, 1]
    ends = ends.assign(height=heights).sort_values("height")
    names = [fill(f"{end.method}, {end.topology.replace('_', ' ')}", NAME_WIDTH) for end in ends.itertuples()]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    gap = lines * 1.25 * NAME_SIZE / 72 / (0.38 * ax.figure.get_figheight())  # 0.38: a panel's share of the figure
    colours = looks(*_kinds(table))["palette"]
    for end, name, height in zip(ends.itertuples(), names, spread(ends["height"], gap), strict=True):
        join = {"arrowstyle": "-", "color": colours[end.method], "linewidth": 0.6, "relpos": (0, 0.5), "shrinkB": 0}
        ax.annotate(
            name,
            (getattr(end, panel.x), end.value),
            (1.08, height),
            textcoords="axes fraction",
            va="center",
            color=colours[end.method],
            fontsize=NAME_SIZE,
            arrowprops=join,
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float) -> np.ndarray:
    """Return ascending heights, moved as little as needed (least squares) to be at least a gap apart."""
    steps = gap * np.arange(len(heights))
    return isotonic_regression(np.asarray(heights) - steps).x + steps if len(heights) else steps


def draw_below_published(collection: Collection, name: str, metrics: dict[str, str]) -> Figure:
    """Draw published curves and, below them, the collection's if it has runs; metrics: {published metric: ours}."""
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
    draw_legends(figure, *_kinds(table))
    figure.suptitle(table.title if runs else f"{table.title} (no finished runs of ours)")
    return figure


def draw_panels(panels: Sequence[Sequence[Panel]], table: Table, size: tuple[float, float], **shared: object) -> Figure:
    """Draw rows of panels with curves of methods (colours) and topologies (styles), in the order of the table."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(panels[0]), squeeze=False, **shared)
    for panel, ax in zip((panel for row in panels for panel in row), axes.flat, strict=True):
        data = panel.data.dropna(subset="value")
        if data.empty:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="0.4")
        else:
            look = looks(*_kinds(table))
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
    return figure


def _kinds(table: Table) -> list[list[str]]:
    """Return the table's methods and its topologies, each once."""
    return [list(dict.fromkeys(getattr(row, key) for row in table.rows)) for key in LINE]


def curves(collection: Collection, metric: str) -> pd.DataFrame:
    """Return the curves of all rows in long form.

    The columns are method, topology, run, step, sent_mb (MB sent per worker until then), time_s and value. Bytes and
    time are means over seeds, because a mean over seeds needs one abscissa. A run that cannot be drawn is named in a
    warning and left out. Once a seed has diverged, its row has no values: the mean of the others would be misleading.
    """
    parts = [pd.DataFrame(columns=[*LINE, "run", "step", "sent_mb", "time_s", "value"])]
    for row in collection.table.rows:
        drawn = [_curve(run, metric) for run in collection.of(row.name)]
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
    """Return a run's curve, None if it cannot be drawn; bytes are from the training rows, time by `seconds_until`."""
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
    """Return the name of the time axis: measured for processes; predicted for simulated workers, for another model."""
    kinds = sorted({f"predicted for\n{ASSUMED_SHORT}" if is_simulated(run) else "measured" for run in runs})
    return ", ".join(["time (s)", *([" or ".join(kinds)] if kinds else [])])
