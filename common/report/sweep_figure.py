"""The figure of a sweep: the final quantity against the learning rate, and the best so far against trials."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from common.report.drawing import COLOURS, LINE_HEIGHT, STYLES, label_of, legend_columns, line_names
from common.report.registry import Table
from common.report.trials import Method

WIDTH = 8.4  # inches


def draw_sweep(table: Table, methods: Sequence[Method]) -> Figure:
    """Draw two panels for each variant and number of workers.

    A line is the mean over tuning seeds, crosses below are rates that diverged.
    """
    panels: dict[str, list[Method]] = {}
    for method in methods:
        workers = f"{method.row.workers} workers" if table.setting == "workers.count" else None
        panels.setdefault(", ".join(filter(None, [method.variant, workers])), []).append(method)
    labels = _names(max(panels.values(), key=len))
    columns = legend_columns(labels, WIDTH)
    height = 0.4 + 2.9 * len(panels) + LINE_HEIGHT * -(-len(labels) // columns)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (panel, shown), (over_rates, over_trials) in zip(panels.items(), axes, strict=True):
        for number, (method, name) in enumerate(zip(shown, _names(shown), strict=True)):
            look = {"color": COLOURS[number % len(COLOURS)], "markersize": 4.5}
            look["marker"] = STYLES[number % len(STYLES)][1]
            _draw_rates(over_rates, method, look | {"label": name})
            _draw_best_so_far(over_trials, method, look)
        label = label_of(table.sweep.quantity)
        over_rates.set(xlabel="learning rate", ylabel=f"{panel}: {label}" if panel else label)
        over_rates.set_xscale("log")
        over_rates.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        over_rates.xaxis.set_minor_locator(NullLocator())
        over_rates.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        over_trials.set(xlabel="trials", ylabel=f"best {label} so far")
        over_trials.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for ax in (over_rates, over_trials):
            ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    count = len(table.sweep.seeds)
    seeds = f"mean of {count} seeds; bars: all of them" if count > 1 else "one seed"
    figure.suptitle(f"Tuning of {table.name} ({seeds})", fontsize=9)
    return figure


def _names(methods: Sequence[Method]) -> list[str]:
    rows = [method.row for method in methods]
    return [f"{name}, {row.topology.replace('_', ' ')}" for name, row in zip(line_names(rows), rows, strict=True)]


def _draw_rates(ax: Axes, method: Method, look: dict[str, object]) -> None:
    """Draw the mean with the best choices at each rate, from the lowest to the highest seed."""
    best: dict[float, tuple[float, ...]] = {}
    for result in method.ranking:
        best.setdefault(result.rate, tuple(trial.value for trial in result.trials))
    means = method.by_rate
    below = [means[rate] - min(best[rate]) for rate in means]
    above = [max(best[rate]) - means[rate] for rate in means]
    ax.errorbar(list(means), list(means.values()), yerr=[below, above], elinewidth=0.8, capsize=2, **look)
    diverged = sorted({result.rate for result in method.results} - means.keys())
    ax.plot(diverged, [0.02] * len(diverged), "x", color=look["color"], transform=ax.get_xaxis_transform())


def _draw_best_so_far(ax: Axes, method: Method, look: dict[str, object]) -> None:
    """Draw the best mean of the first trials, in the order of the grid."""
    choose = max if method.grid.sweep.best == "highest" else min
    counts, bests, trials = [], [], 0
    for result in method.results:
        trials += len(result.trials)
        found = [value for value in (result.mean, *bests[-1:]) if value is not None]
        if found:
            counts.append(trials)
            bests.append(choose(found))
    ax.plot(counts, bests, **look)
