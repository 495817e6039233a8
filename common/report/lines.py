"""Numbers against a setting: final metrics of a table, columns of a record, trials of a sweep, and bars of any."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from omegaconf import OmegaConf

from common.experiments.collect import Collection
from common.experiments.quantities import QUANTITIES
from common.experiments.table_file import Row
from common.report.style import COLOURS, label_of, looks, seeds_of

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
WIDTH = 0.86  # of a group of bars
DODGE = 0.06  # between lines, in powers of two of the setting
LABELS = {
    "workers.count": "workers",
    "training.batch_size": "batch of all workers together",
    "optimizer.accumulation_steps": "accumulation steps",
}


def draw_over_setting(collection: Collection) -> Figure:
    """Draw the final metric against the table's setting, a line for each method and topology.

    A line is the mean over seeds, its bars go from the lowest to the highest seed. A tuned table has a second panel
    with the learning rates that its sweep chose, the same for all seeds. Lines are shifted sideways, so that their bars
    do not hide one another.
    """
    table = collection.table
    names = [table.metric, *(["learning_rate"] if table.sweep else [])]
    lines = list(dict.fromkeys(map(_line_of, table.rows)))
    data = pd.DataFrame(
        {"setting": float(OmegaConf.select(OmegaConf.create(run.config), table.setting)), "line": _line_of(row)}
        | {name: QUANTITIES[name].of(run) for name in names}
        for row in table.rows
        for run in collection.runs[row.name]
    )
    places = dict(zip(lines, DODGE * (np.arange(len(lines)) - (len(lines) - 1) / 2), strict=True))
    data["x"] = np.log2(data["setting"]) + data["line"].map(places)
    figure = Figure(figsize=(4.2 + 3.0 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        spread = None if name == "learning_rate" else ("pi", 100)
        _draw(ax, data, "x", name, lines, errorbar=spread, err_style="bars", err_kws={"elinewidth": 0.8, "capsize": 2})
        settings = sorted(set(data["setting"]))
        ax.set_xticks(np.log2(settings), [f"{value:g}" for value in settings])
        ax.grid(visible=False, axis="x")
        ax.set(xlabel=LABELS.get(table.setting, table.setting), ylabel=label_of(name))
    for ax in axes[1:]:  # learning rates
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    seeds = seeds_of(collection.frame.groupby("row")["seed"].nunique())
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; bars: lowest to highest)")
    return figure


def _line_of(row: Row) -> str:
    return f"{row.method}, {row.topology.replace('_', ' ')}"


def draw_record(frame: pd.DataFrame, title: str, x: str, line: str, values: Mapping[str, str]) -> Figure:
    """Draw columns of a record {column: axis} against another one, a panel each; `line` is a template of labels."""
    labels = [line.format(**row).replace("_", " ") for row in frame.to_dict("records")]
    figure = Figure(figsize=(4.4 * len(values), 4.4), layout="constrained")
    axes = figure.subplots(1, len(values), squeeze=False)[0]
    for ax, (column, label) in zip(axes, values.items(), strict=True):
        _draw(ax, frame.assign(line=labels), x, column, list(dict.fromkeys(labels)), errorbar=None)
        ax.set(xscale="log", yscale="log", xlabel=x, ylabel=label)
        ticks = sorted(set(frame[x]))
        ax.set_xticks(ticks, [f"{value:,}" for value in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title)
    return figure


def draw_bars(frame: pd.DataFrame, title: str, ylabel: str, columns: int, mark: str = "") -> Figure:
    """Draw a frame with the columns panel, group, bar and height, and with `mark`, a height to mark on each bar.

    Bars have their heights as numbers above them, or marks. `columns` panels are beside each other.
    """
    panels, bars = list(frame.groupby("panel", sort=False)), list(dict.fromkeys(frame["bar"]))
    rows, width = -(-len(panels) // columns), WIDTH / len(bars)
    figure = Figure(figsize=(10.2, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    colours, hatches = (COLOURS[1:], ("",)) if mark else (COLOURS, HATCHES)  # marks are black
    for ax, (panel, data) in zip(axes, panels, strict=False):
        groups = list(dict.fromkeys(data["group"]))
        for number, (name, colour, hatch) in enumerate(zip(bars, cycle(colours), cycle(hatches), strict=False)):
            of = data[data["bar"] == name]
            places = [groups.index(group) + (number - (len(bars) - 1) / 2) * width for group in of["group"]]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            drawn = ax.bar(places, of["height"], width, label=name, **look)
            if mark:
                ax.plot(places, of[mark], "_", color="black", markersize=9, markeredgewidth=1.5, label=mark)
            else:
                ax.bar_label(drawn, fmt="%.1f", fontsize=5.5, padding=1)
        ax.set_xticks(range(len(groups)), groups, fontsize=6.5 if mark else None)
        ax.grid(visible=False, axis="x")
        ax.set(title=panel, ylabel=ylabel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4))
    figure.suptitle(title)
    return figure


def _draw(ax: Axes, data: pd.DataFrame, x: str, y: str, lines: Sequence[str], **spread: object) -> None:
    sns.lineplot(data=data, x=x, y=y, hue="line", style="line", **looks(lines, lines), **spread, ax=ax)
    ax.get_legend().remove()
