"""Learning curves of a table's runs: training loss and validation metric against steps, bytes sent and time.

A table whose rows differ in a setting is drawn against that instead: see common.report.over_figure.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from common.report.changes import changes, mark_changes
from common.report.collect import Collection
from common.report.drawing import (
    COLOURS,
    CURVES_WIDTH,
    LEGEND_ROWS,
    LINE_HEIGHT,
    MARKERS_PER_CURVE,
    STYLES,
    draw_legends,
    label_of,
    legend_rows,
    line_names,
    recorded_as,
    save,
    seeds_of,
)
from common.report.elapsed import is_simulated, seconds_until
from common.report.over_figure import draw_over_setting
from common.report.prediction import ASSUMED_SHORT
from common.report.registry import Table
from common.report.runs import FinishedRun, RunError

logger = logging.getLogger(__name__)


def write_figures(collection: Collection, folder: Path) -> list[Path]:
    """Write <folder>/<table>[_<variant>].png, and .svg unless it is large, for variants with runs; return the paths.

    A table over a setting is one picture with all its variants.
    """
    table = collection.table
    if table.setting is not None:
        return save(lambda: draw_over_setting(collection), folder, table.name) if collection.all_runs else []
    variants = [each for each in collection.by_variant() if each.all_runs]
    return [file for each in variants for file in save(lambda each=each: draw(each), folder, each.table.name)]


def draw(collection: Collection) -> Figure:
    """Draw training loss and validation metric (rows) against steps, bytes sent and time (columns): 2 x 3 panels.

    A line is the mean over seeds, its band goes from the lowest to the highest seed. Marks are where workers left or
    joined in any of them. Rows of one method and topology are told apart by their labels.
    """
    collection = replace(collection, table=with_line_names(collection.table))
    table, found = collection.table, changes(collection)
    panels = [(curves(collection, metric), label_of(metric)) for metric in ("train_loss", table.metric)]
    xs = {"step": "step", "sent_mb": "sent per worker (MB)", "time_s": time_label(collection.all_runs, "s")}
    extra = max(0, max(legend_rows(*labels_of(table))) - LEGEND_ROWS)
    figure = Figure(figsize=(CURVES_WIDTH, 5.6 + LINE_HEIGHT * extra), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    for (data, label), row in zip(panels, axes, strict=True):
        for x, ax in zip(xs, row, strict=True):
            draw_panel(ax, table, data, x)
            mark_changes(ax, data, found, x)
            ax.set(xlabel=xs[x], ylabel=label)
            ax.label_outer()
    if not found.empty:
        axes[0, 0].legend()
    _scale_loss(axes[0, 0], panels[0][0]["value"])
    _scale_bytes(axes[0, 1], panels[1][0])
    figure.align_ylabels(axes)
    seeds = seeds_of(pd.concat([data for data, _ in panels]).groupby(["method", "topology"])["run"].nunique())
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; band: lowest to highest)", fontsize=9)
    draw_legends(figure, *labels_of(table))
    return figure


def curves(collection: Collection, metric: str) -> pd.DataFrame:
    """Return the curves of all rows in long form.

    The columns are method, topology, run, step, sent_mb (MB sent per worker until then), time_s and value. Bytes and
    time are means over seeds, because a mean over seeds needs one abscissa. A run that cannot be drawn is named in a
    warning and left out. Once a seed has diverged, its row has no values: the mean of the others would be misleading.
    """
    parts = []
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
    columns = ["method", "topology", "run", "step", "sent_mb", "time_s", "value"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def time_label(runs: list[FinishedRun], unit: str) -> str:
    """Return the name of the time axis: measured for processes; for simulated workers predicted, of another model."""
    kinds = {f"predicted for\n{ASSUMED_SHORT}" if is_simulated(run) else "measured" for run in runs}
    return ", ".join([f"time ({unit})", *filter(None, [" or ".join(sorted(kinds))])])


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
        logger.warning(
            "%s: %s is not finite from step %d on: its row's curve ends there", run.folder, metric, diverged.iloc[0]
        )
    return frame


def draw_panel(ax: Axes, table: Table, data: pd.DataFrame, x: str) -> None:
    """Draw the curves of all methods (colours) and topologies (styles) into a panel."""
    sns.despine(ax=ax)
    data = data.dropna(subset="value")
    if data.empty:
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="0.4")
        return
    methods, topologies = labels_of(table)
    styles = dict(zip(topologies, STYLES, strict=False))
    longest = data.groupby(["method", "topology"])["step"].nunique().max()
    sns.lineplot(
        data=data,
        x=x,
        y="value",
        hue="method",
        hue_order=methods,
        palette=dict(zip(methods, COLOURS, strict=False)),
        style="topology",
        style_order=topologies,
        dashes={topology: dash for topology, (dash, _) in styles.items()},
        markers={topology: marker for topology, (_, marker) in styles.items()},
        markevery=max(1, longest // MARKERS_PER_CURVE),
        markersize=4.5,
        markeredgewidth=0.5,
        errorbar=("pi", 100),
        err_kws={"alpha": 0.12, "linewidth": 0},
        legend=False,
        ax=ax,
    )
    ax.xaxis.set_major_locator(MaxNLocator(5))


def _scale_loss(ax: Axes, losses: pd.Series) -> None:
    """Use a logarithmic axis where the loss falls by more than a decade; else the ends of all curves coincide."""
    if 0 < losses.min() * 10 < losses.max():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _scale_bytes(ax: Axes, data: pd.DataFrame) -> None:
    """Use a logarithmic axis where a line sends ten times as many bytes as another, as with local steps."""
    sent = data.groupby(["method", "topology"])["sent_mb"].max()
    if 0 < sent.min() * 10 < sent.max():
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def with_line_names(table: Table) -> Table:
    """Return the table with methods called as its lines: rows that only labels tell apart have these in their names."""
    names = zip(table.rows, line_names(table.rows), strict=True)
    return table.model_copy(update={"rows": tuple(row.model_copy(update={"method": name}) for row, name in names)})


def labels_of(table: Table) -> tuple[list[str], list[str]]:
    """Return methods and topologies in the order in which the table names them."""
    methods = dict.fromkeys(row.method for row in table.rows)
    return list(methods), list(dict.fromkeys(row.topology for row in table.rows))
