"""Final metrics of a table against a setting, and bars of a benchmark's table."""

from collections.abc import Sequence
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


def draw_bars(frame: pd.DataFrame, title: str, ylabel: str) -> Figure:
    """Draw a frame with the columns panel, group, bar and height; numbers above the bars are their heights."""
    panels, bars = list(frame.groupby("panel", sort=False)), list(dict.fromkeys(frame["bar"]))
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(10.2, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for ax, (panel, data) in zip(axes, panels, strict=False):
        look = {"hue_order": bars, "palette": COLOURS[: len(bars)], "saturation": 1, "linewidth": 0.4}
        sns.barplot(data, x="group", y="height", hue="bar", **look, edgecolor="white", ax=ax)
        for drawn, hatch in zip(ax.containers, cycle(HATCHES)):
            for bar in drawn:
                bar.set_hatch(hatch)
            ax.bar_label(drawn, fmt="%.1f", fontsize=5.5, padding=1)
        ax.get_legend().remove()
        ax.grid(visible=False, axis="x")
        ax.set(title=panel, xlabel="", ylabel=ylabel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4))
    figure.suptitle(title)
    return figure


def _draw(ax: Axes, data: pd.DataFrame, x: str, y: str, lines: Sequence[str], **spread: object) -> None:
    sns.lineplot(data=data, x=x, y=y, hue="line", style="line", **looks(lines, lines), **spread, ax=ax)
    ax.get_legend().remove()
