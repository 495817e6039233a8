"""The figure of a sweep: the final quantity against the learning rate, with the parabolas that were fitted."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from common.report.drawing import COLOURS, LINE_HEIGHT, STYLES, label_of, legend_columns, line_names
from common.report.registry import Table
from common.report.trials import Method

WIDTH = 8.4  # inches


def draw_sweep(table: Table, methods: Sequence[Method]) -> Figure:
    """Draw a panel for each variant and number of workers.

    A line is the mean over tuning seeds with the values that were chosen besides the rate, crosses below are rates that
    diverged with them; a parabola ends where its fit does, and a bar below shows the interval of its optimum.
    """
    panels: dict[str, list[Method]] = {}
    for method in methods:
        workers = f"{method.row.workers} workers" if table.setting == "workers.count" else None
        panels.setdefault(", ".join(filter(None, [method.variant, workers])), []).append(method)
    labels = _names(max(panels.values(), key=len))
    columns = legend_columns(labels, WIDTH)
    height = 0.4 + 2.9 * len(panels) + LINE_HEIGHT * -(-len(labels) // columns)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for (panel, shown), ax in zip(panels.items(), axes, strict=True):
        for number, (method, name) in enumerate(zip(shown, _names(shown), strict=True)):
            look = {"color": COLOURS[number % len(COLOURS)], "markersize": 4.5}
            look["marker"] = STYLES[number % len(STYLES)][1]
            _draw_rates(ax, method, look | {"label": name}, height=0.01 + 0.015 * number)
        label = label_of(table.sweep.quantity)
        ax.set(xlabel="learning rate", ylabel=f"{panel}: {label}" if panel else label)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    count = len(table.sweep.seeds)
    seeds = f"mean of {count} seeds; bars: all of them" if count > 1 else "one seed"
    figure.suptitle(f"Tuning of {table.name} ({seeds})", fontsize=9)
    return figure


def _names(methods: Sequence[Method]) -> list[str]:
    rows = [method.row for method in methods]
    return [f"{name}, {row.topology.replace('_', ' ')}" for name, row in zip(line_names(rows), rows, strict=True)]


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
