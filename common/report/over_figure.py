"""A table over a setting: the final metric, and tuned learning rates, against a number of the configuration."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from omegaconf import OmegaConf

from common.report.collect import Collection
from common.report.drawing import COLOURS, STYLES, label_of, seeds_of
from common.report.quantities import QUANTITIES
from common.report.table_file import Row

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
    data = pd.DataFrame(
        {"setting": OmegaConf.select(OmegaConf.create(run.config), table.setting), "line": _line_label(row)}
        | {name: QUANTITIES[name].of(run) for name in names}
        for row in table.rows
        for run in collection.runs[row.name]
    )
    figure = Figure(figsize=(4.2 + 3.0 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        _draw_lines(ax, data, name, list(dict.fromkeys(map(_line_label, table.rows))))
        ax.set(xlabel=LABELS.get(table.setting, table.setting), ylabel=label_of(name))
    for ax in axes[1:]:  # learning rates
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    seeds = seeds_of(len({run.seed for run in runs}) for runs in collection.runs.values() if runs)
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; bars: lowest to highest)", fontsize=9)
    return figure


def _draw_lines(ax: Axes, data: pd.DataFrame, name: str, lines: list[str]) -> None:
    beside = dict(zip(lines, DODGE * (np.arange(len(lines)) - (len(lines) - 1) / 2), strict=True))
    sns.lineplot(
        data=data.assign(x=np.log2(data["setting"].astype(float)) + data["line"].map(beside)),
        x="x",
        y=name,
        hue="line",
        hue_order=lines,
        palette=dict(zip(lines, COLOURS, strict=False)),
        style="line",
        style_order=lines,
        dashes=dict(zip(lines, (dash for dash, _ in STYLES), strict=False)),
        markers=dict(zip(lines, (marker for _, marker in STYLES), strict=False)),
        markersize=5,
        markeredgewidth=0.5,
        errorbar=None if name == "learning_rate" else ("pi", 100),
        err_style="bars",
        err_kws={"elinewidth": 0.8, "capsize": 2},
        ax=ax,
    )
    values = sorted(set(data["setting"]))
    ax.set_xticks(np.log2(np.array(values, dtype=float)), [f"{value:g}" for value in values])
    ax.get_legend().remove()
    ax.grid(visible=False, axis="x")
    sns.despine(ax=ax)


def _line_label(row: Row) -> str:
    return f"{row.method}, {row.topology.replace('_', ' ')}"
