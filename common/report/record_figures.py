"""Figures of benchmarks' records: lines of columns, and measured bars with predictions beside them."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from common.planner.conditions import CONDITIONS
from common.report.drawing import COLOURS, STYLES
from common.report.figure_files import Lines, Predictions

WIDTH = 0.8  # of all bars of a method
CASE = ["model", "hosts", "ranks_per_host", "mbit_per_s", "compute_ms"]  # a panel


def draw_record(figure_file: Lines | Predictions, frame: pd.DataFrame) -> Figure:
    """Draw a figure of a record that was read."""
    return draw_lines(figure_file, frame) if isinstance(figure_file, Lines) else draw_predictions(figure_file, frame)


def draw_lines(figure_file: Lines, frame: pd.DataFrame) -> Figure:
    """Draw columns of a record against another one, a panel for each column and a line for each label."""
    labels = [figure_file.line.format(**row).replace("_", " ") for row in frame.to_dict("records")]
    order = list(dict.fromkeys(labels))
    figure = Figure(figsize=(4.4 * len(figure_file.values), 4.4), layout="constrained")
    axes = figure.subplots(1, len(figure_file.values), squeeze=False)[0]
    for ax, (column, label) in zip(axes, figure_file.values.items(), strict=True):
        sns.lineplot(
            data=frame.assign(line=labels),
            x=figure_file.x,
            y=column,
            hue="line",
            hue_order=order,
            palette=dict(zip(order, COLOURS, strict=False)),
            style="line",
            style_order=order,
            dashes=dict(zip(order, (dash for dash, _ in STYLES), strict=False)),
            markers=dict(zip(order, (marker for _, marker in STYLES), strict=False)),
            markersize=5,
            errorbar=None,
            ax=ax,
        )
        ax.set(xscale="log", yscale="log", xlabel=figure_file.x, ylabel=label)
        values = sorted(set(frame[figure_file.x]))
        ax.set_xticks(values, [f"{value:,}" for value in values])
        ax.xaxis.set_minor_locator(NullLocator())
        sns.despine(ax=ax)
    handles, shown = axes[0].get_legend_handles_labels()
    for ax in axes:
        ax.get_legend().remove()
    figure.legend(handles, shown, loc="outside lower center", ncols=3)
    figure.suptitle(figure_file.title, fontsize=9)
    return figure


def draw_predictions(figure_file: Predictions, frame: pd.DataFrame) -> Figure:
    """Draw measured step times as bars, one for each condition, and the predicted ones as marks on them."""
    cases = list(frame.groupby(CASE, sort=False))
    names = [name for name in CONDITIONS if name in set(frame.condition)]
    figure = Figure(figsize=(10.2, 0.9 + 3.2 * len(cases)), layout="constrained")
    axes = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for ax, (case, rows) in zip(axes, cases, strict=True):
        _draw_case(ax, rows, names)
        model, hosts, ranks, rate, compute_ms = case
        title = f"{model} on {hosts} hosts x {ranks}, {rate:g} Mbit/s, {compute_ms:g} ms of computing"
        ax.set(title=title, ylabel="ms per step")
    handles, labels = axes[0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))  # the marks of all conditions look alike
    figure.legend(known.values(), known, loc="outside lower center", ncols=3)
    figure.suptitle(figure_file.title, fontsize=9)
    return figure


def _draw_case(ax: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    topologies = rows.topology.str.replace("/", "/\n", n=1)
    methods = (rows.engine + "\n" + topologies).str.replace("_", " ")
    order = {method: place for place, method in enumerate(methods.unique())}
    width = WIDTH / len(names)
    for number, (name, colour) in enumerate(zip(names, COLOURS[1:], strict=False)):
        chosen = (rows.condition == name).to_numpy()
        left = (number - (len(names) - 1) / 2) * width
        places = [order[method] + left for method, wanted in zip(methods, chosen, strict=True) if wanted]
        ax.bar(places, rows.measured_ms[chosen], width, color=colour, label=f"measured, {CONDITIONS[name].label}")
        ax.plot(places, rows.predicted_ms[chosen], "_", color="black", markersize=9, label="predicted")
    ax.set_xticks(range(len(order)), order, fontsize=6.5)
    ax.grid(visible=False, axis="x")
    sns.despine(ax=ax)
