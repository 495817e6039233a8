"""Draws a table's runs: training loss and validation metric against steps and against bytes sent.

A table with several numbers of workers is drawn as the final metric against the number of workers instead.
"""

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from common.report.collect import Collection
from common.report.columns import QUANTITIES
from common.report.registry import Row, Table
from common.report.runs import Run

# Okabe and Ito's palette: told apart by colour-blind readers and in grey print.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# A line style (on, off, ... in line widths) and a marker for each topology.
STYLES = (("", "o"), ((4, 1.5), "s"), ((1, 1.2), "^"), ((5, 1.5, 1, 1.5), "D"), ((7, 2), "v"), ((2, 1), "P"))
MARKERS_PER_CURVE = 8
DODGE = 0.06  # between lines over numbers of workers, in powers of two
LARGEST_SVG_BYTES = 1_000_000

METRIC_LABELS = {
    "accuracy": "validation accuracy (%)",
    "bleu": "validation BLEU",
    "validation_loss": "validation loss",
}
RECORDED_AS = {"validation_loss": "loss"}  # metrics that a validation row has under another name
AXIS_LABELS = {"step": "step", "sent_mb": "sent per worker (MB)"}

RC = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.7,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 3.0,
    "svg.hashsalt": "report",  # the same data gives the same file
    "svg.fonttype": "none",
}


def write_figure(collection: Collection, folder: Path) -> list[Path]:
    """Writes <folder>/<table>.png, and .svg unless it is large; returns the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = collection.table.name
    with mpl.rc_context({**sns.axes_style("whitegrid"), **RC}):
        several = len({row.workers for row in collection.table.rows}) > 1
        figure = draw_over_workers(collection) if several else draw(collection)
        png = folder / f"{name}.png"
        figure.savefig(png, dpi=200)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    svg_path = folder / f"{name}.svg"
    if svg.tell() > LARGEST_SVG_BYTES:
        svg_path.unlink(missing_ok=True)  # an older one would show other data than the PNG
        return [png]
    svg_path.write_bytes(svg.getvalue())
    return [png, svg_path]


def draw(collection: Collection) -> Figure:
    """2 x 2 panels: training loss and validation metric (rows) against steps and bytes sent (columns).

    A line is the mean over seeds, its band goes from the lowest to the highest seed.
    """
    table = collection.table
    panels = [
        (curves(collection, "train", "loss"), "training loss"),
        (
            curves(collection, "validation", RECORDED_AS.get(table.metric, table.metric)),
            METRIC_LABELS.get(table.metric, table.metric),
        ),
    ]
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for (data, label), row in zip(panels, axes, strict=True):
        for x, ax in zip(AXIS_LABELS, row, strict=True):
            _draw_panel(ax, table, data, x)
            ax.set(xlabel=AXIS_LABELS[x], ylabel=label)
            ax.label_outer()
    seeds = sorted({len(runs) for runs in collection.runs.values() if runs})
    count = "-".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    _scale_loss(axes[0, 0], panels[0][0]["value"])
    figure.align_ylabels(axes)
    figure.suptitle(f"{table.title} (mean of {count} seeds; band: lowest to highest)", fontsize=9)
    _draw_legends(figure, table)
    return figure


def draw_over_workers(collection: Collection) -> Figure:
    """The final validation metric against the number of workers, a line for each method and topology.

    A line is the mean over seeds, its bars go from the lowest to the highest seed. Lines stand a little beside each
    other, or their bars would hide one another.
    """
    table = collection.table
    quantity = QUANTITIES[table.metric]
    labels = list(dict.fromkeys(map(_line_label, table.rows)))
    beside = dict(zip(labels, DODGE * (np.arange(len(labels)) - (len(labels) - 1) / 2), strict=True))
    data = pd.DataFrame(
        {"workers": run.total("workers"), "value": quantity.of(run), "line": _line_label(row)}
        for row in table.rows
        for run in collection.runs[row.name]
    )
    data["x"] = np.log2(data["workers"]) + data["line"].map(beside)
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    ax = figure.subplots()
    sns.lineplot(
        data=data,
        x="x",
        y="value",
        hue="line",
        hue_order=labels,
        palette=dict(zip(labels, COLOURS, strict=False)),
        style="line",
        style_order=labels,
        dashes=dict(zip(labels, (dash for dash, _ in STYLES), strict=False)),
        markers=dict(zip(labels, (marker for _, marker in STYLES), strict=False)),
        markersize=5,
        markeredgewidth=0.5,
        errorbar=("pi", 100),
        err_style="bars",
        err_kws={"elinewidth": 0.8, "capsize": 2},
        ax=ax,
    )
    workers = sorted(set(data["workers"]))
    ax.set_xticks(np.log2(workers), [f"{count:g}" for count in workers])
    ax.set(xlabel="workers", ylabel=METRIC_LABELS.get(table.metric, table.metric))
    ax.get_legend().remove()
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    seeds = max(len(runs) for runs in collection.runs.values())
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; bars: lowest to highest)", fontsize=9)
    ax.grid(visible=False, axis="x")
    sns.despine(ax=ax)
    return figure


def _line_label(row: Row) -> str:
    return f"{row.method}, {row.topology.replace('_', ' ')}"


def curves(collection: Collection, split: str, metric: str) -> pd.DataFrame:
    """Long form: method, topology, step, sent_mb (MB sent per worker until then, mean over seeds), value."""
    table = collection.table
    parts = []
    for row in table.rows:
        runs = [_curve(run, split, metric) for run in collection.runs[row.name]]
        if runs:
            frame = pd.concat(runs, ignore_index=True)
            # Random topologies may send differently for each seed; a mean over seeds needs one abscissa.
            frame["sent_mb"] = frame.groupby("step")["sent_mb"].transform("mean")
            parts.append(frame.assign(method=row.method, topology=row.topology))
    return pd.concat(parts, ignore_index=True)


def _curve(run: Run, split: str, metric: str) -> pd.DataFrame:
    """One run's curve; the bytes at a step are read off the training rows, which count them."""
    frame = run.curve(split, metric).rename(columns={metric: "value"})
    sent = run.curve("train", "bytes_sent").dropna()
    steps, megabytes = sent["step"].to_numpy(), sent["bytes_sent"].to_numpy() / run.total("workers") / 1e6
    return frame.assign(sent_mb=np.interp(frame["step"], [0, *steps], [0, *megabytes]))


def _draw_panel(ax: Axes, table: Table, data: pd.DataFrame, x: str) -> None:
    methods, topologies = _labels(table)
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
    ax.xaxis.set_major_locator(MaxNLocator(6))
    sns.despine(ax=ax)


def _scale_loss(ax: Axes, losses: pd.Series) -> None:
    """A logarithmic axis where the loss falls by more than a decade, else the ends of all curves coincide."""
    if 0 < losses.min() * 10 < losses.max():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_legends(figure: Figure, table: Table) -> None:
    """Methods (colours) and topologies (styles) apart, below the panels."""
    methods, topologies = _labels(table)
    colours = [
        Line2D([], [], color=colour, linewidth=2.2, label=method)
        for method, colour in zip(methods, COLOURS, strict=False)
    ]
    styles = [
        Line2D([], [], linestyle=(0, dash) if dash else "-", marker=marker, label=topology.replace("_", " "))
        for topology, (dash, marker) in zip(topologies, STYLES, strict=False)
    ]
    for line in styles:
        line.set(color="0.35", markersize=4.5)
    for handles, title, side in ((colours, "method", "left"), (styles, "topology", "right")):
        place = f"outside lower {side}"
        figure.legend(handles=handles, title=title, loc=place, ncols=len(handles), alignment="left")


def _labels(table: Table) -> tuple[list[str], list[str]]:
    """Methods and topologies in the order in which the table names them."""
    methods = dict.fromkeys(row.method for row in table.rows)
    return list(methods), list(dict.fromkeys(row.topology for row in table.rows))
