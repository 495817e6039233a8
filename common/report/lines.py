"""Numbers against a setting: final metrics of a table, columns of a record, trials of a sweep, and bars of any."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from omegaconf import OmegaConf

from common.experiments.collect import Collection
from common.experiments.quantities import QUANTITIES
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.choices import Method
from common.report.style import COLOURS, STYLES, label_of, line_names, looks, seeds_of

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
    seeds = seeds_of(len({run.seed for run in runs}) for runs in collection.runs.values() if runs)
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; bars: lowest to highest)")
    return figure


def _line_of(row: Row) -> str:
    return f"{row.method}, {row.topology.replace('_', ' ')}"


def draw_record(frame: pd.DataFrame, x: str, line: str, values: Mapping[str, str]) -> Figure:
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
    return figure


def draw_bars(frame: pd.DataFrame, ylabel: str, columns: int, mark: str = "") -> Figure:
    """Draw a frame with the columns panel, group, bar and height, and with `mark`, a height to mark on each bar.

    Bars have their heights as numbers above them, or marks. `columns` panels are beside each other.
    """
    panels, bars = list(frame.groupby("panel", sort=False)), list(dict.fromkeys(frame["bar"]))
    rows, width = -(-len(panels) // columns), WIDTH / len(bars)
    figure = Figure(figsize=(10.2, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    colours, hatches = (COLOURS[1:], ("",)) if mark else (COLOURS, HATCHES)  # marks are black
    for ax, (title, data) in zip(axes, panels, strict=False):
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
        ax.set(title=title, ylabel=ylabel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure


def _draw(ax: Axes, data: pd.DataFrame, x: str, y: str, lines: Sequence[str], **spread: object) -> None:
    sns.lineplot(data=data, x=x, y=y, hue="line", style="line", **looks(lines, lines), **spread, ax=ax)
    ax.get_legend().remove()


def draw_sweep(table: Table, methods: Sequence[Method]) -> Figure:
    """Draw what was tuned against the learning rate, a panel for each variant and number of workers.

    A line is the mean over tuning seeds with the values that were chosen besides the rate, crosses below are rates that
    diverged with them; a parabola ends where its fit does, and a bar below shows the interval of its optimum.
    """
    panels: dict[str, list[Method]] = {}
    for method in methods:
        workers = f"{method.row.workers} workers" if table.setting == "workers.count" else None
        panels.setdefault(", ".join(filter(None, [method.variant, workers])), []).append(method)
    longest = max(panels.values(), key=len)
    height = 0.4 + 2.9 * len(panels) + 0.16 * -(-len(longest) // 2)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for (panel, shown), ax in zip(panels.items(), axes, strict=True):
        rows = [method.row for method in shown]
        names = [f"{name}, {r.topology.replace('_', ' ')}" for name, r in zip(line_names(rows), rows, strict=True)]
        for number, (method, name) in enumerate(zip(shown, names, strict=True)):
            look = {"color": COLOURS[number % len(COLOURS)], "marker": [*STYLES][number % len(STYLES)], "label": name}
            _draw_rates(ax, method, look, height=0.01 + 0.015 * number)
        label = label_of(table.sweep.quantity)
        ax.set(xlabel="learning rate", ylabel=f"{panel}: {label}" if panel else label)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    where = axes[list(panels.values()).index(longest)]
    figure.legend(*where.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    count = len(table.sweep.seeds)
    seeds = f"mean of {count} seeds; bars: all of them" if count > 1 else "one seed"
    figure.suptitle(f"Tuning of {table.name} ({seeds})")
    return figure


def _draw_rates(ax: Axes, method: Method, look: dict[str, object], height: float) -> None:
    """Draw means at each rate, from the lowest to the highest seed, and the parabola, its interval at this height."""
    if not method.ranking:
        return
    best = method.ranking[0]
    line = method.line(best.result)
    rates, means = [result.rate for result in line], [result.mean for result in line]
    values = [[trial.value for trial in result.trials] for result in line]
    bars = [[mean - min(of) for mean, of in zip(means, values, strict=True)]]
    bars += [[max(of) - mean for mean, of in zip(means, values, strict=True)]]
    ax.errorbar(rates, means, yerr=bars, elinewidth=0.8, capsize=2, **look, linestyle=":" if best.optimum else "-")
    alike = {result.rate for result in method.results if result.point.choices == best.result.point.choices}
    below, colour = ax.get_xaxis_transform(), look["color"]
    diverged = sorted(alike - {*rates})
    ax.plot(diverged, [0.02] * len(diverged), "x", color=colour, transform=below)
    if best.optimum:
        inside = np.geomspace(*best.optimum.span, 50)
        ax.plot(inside, np.polyval(best.optimum.parabola, np.log(inside)), color=colour)
        ax.plot([best.optimum.low, best.optimum.high], [height] * 2, color=colour, linewidth=2, transform=below)
