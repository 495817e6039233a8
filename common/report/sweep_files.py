"""The files that a sweep writes to results/sweeps: <table>.csv, .yaml, .md and .png."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from common.experiments.sweeps import RATE, Tuned, TunedFile
from common.experiments.tables import Table
from common.experiments.trials import Method
from common.report.origin import describe_commit, describe_hardware
from common.report.style import COLOURS, draw_lines, label_of, line_names, save, scale_log
from common.report.tables import csv_text, markdown, page, write_texts

LEFT = ("method", "topology", "variant", "best", "runner_up", "edge", "taken_by")


def write_sweep(
    table: Table, trials: pd.DataFrame, methods: Sequence[Method], folder: Path, command: str
) -> list[Path]:
    """Write all files of a sweep whose trials have ended; return their paths. `command` is what the user typed.

    Raises UsageError, before anything is written, if all trials of a method diverged.
    """
    tuned = TunedFile(sweep=table.sweep, methods={method.name: method.tuned for method in methods})
    records = trial_records(table, trials)
    texts = {"csv": csv_text(records), "md": sweep_page(table, methods, records, command)}
    files = write_texts(folder / table.name, texts | {"yaml": tuned_text(tuned, command)})
    return [*files, *save(lambda: draw_sweep(table, methods), folder, table.name)]


def tuned_text(tuned: TunedFile, command: str) -> str:
    """Return the content of <table>.yaml."""
    content = OmegaConf.to_yaml(OmegaConf.create(tuned.model_dump(mode="json", exclude_none=True)))
    return f"# Made by `{command}`: the rows of the table take the best overrides.\n{content}"


def trial_records(table: Table, trials: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each trial, in the order of the grid, as <table>.csv has it."""
    return pd.DataFrame(
        [
            {
                "row": trial["row"].name,
                **({"variant": trial["variant"]} if table.variants else {}),
                RATE: str(trial["rate"]),
                "seed": trial["seed"],
                table.sweep.quantity: None if math.isnan(trial["value"]) else trial["value"],
                "status": "diverged" if math.isnan(trial["value"]) else "finished",
                "steps": trial["steps"],
                "seconds": None if math.isnan(trial["seconds"]) else round(trial["seconds"]),
                "commit": describe_commit(trial["environment"]),
                "hardware": describe_hardware(trial["environment"]),
                "date": trial["environment"]["start"],
            }
            for trial in trials.to_dict("records")
        ],
        dtype=object,  # pandas would turn None (diverged) into NaN
    )


def sweep_frame(table: Table, tuned: Mapping[str, Tuned]) -> pd.DataFrame:
    """Return the table of a sweep's choices as texts; tuned: {method: what was chosen}."""
    quantity, lines = table.sweep.of, []
    variants = [*table.variants] or [None]
    for row, variant in ((row, variant) for row in table.tuned_rows for variant in variants):
        name = table.method(row, variant)
        of = tuned[name]
        takers = [other.name for other in table.rows for v in variants if table.method(other, v) == name]
        line = {"method": row.method, "topology": row.topology, **row.labels}
        line |= {"workers": str(row.workers)} if table.setting == "workers.count" else {}
        line |= {"variant": str(variant)} if table.variants else {}
        line |= {"trials": str(of.trials), "diverged": str(of.diverged)}
        line |= {"best": " ".join(of.best.overrides), quantity.name: format(of.best.mean, quantity.style)}
        if table.sweep.fit:
            line["interval"] = "{:.3g} to {:.3g}".format(*of.interval) if of.interval else "none"
            line["scatter"] = format(of.scatter, quantity.style) if of.interval else ""
        else:
            line["runner_up"] = " ".join(of.runner_up.overrides) if of.runner_up else ""
            line[f"{quantity.name}_of_runner_up"] = format(of.runner_up.mean, quantity.style) if of.runner_up else ""
        lines.append(line | {"edge": of.edge or "", "taken_by": ", ".join(takers)})
    return pd.DataFrame(lines)


def sweep_page(table: Table, methods: Sequence[Method], records: pd.DataFrame, command: str) -> str:
    """Return a sweep's page in Markdown."""
    sweep, grid, name = table.sweep, methods[0].grid, table.name
    seeds, dates = ", ".join(map(str, sweep.seeds)), sorted(records["date"])
    points = f"{len(methods[0].values)} points: learning rates centre x 2^k, k = {grid[0]} to {grid[-1]}"
    note = (
        f"Every method was trained at {points}; seeds {seeds}, none of which the table reports.\n\n"
        "The grid grows, for all methods alike, while one of them is best at an edge, at most "
        f"{sweep.extensions} times; rates added: {len(grid) - sweep.rates}."
    )
    chosen = markdown(sweep_frame(table, {method.name: method.tuned for method in methods}), LEFT)
    columns = {
        "trials": "number of runs, the same for every method",
        "diverged": "how many of them diverged; their values count as the worst",
        "best": f"the overrides with the {sweep.best} mean; of equal ones the nearest to the centre",
        sweep.quantity: f"{sweep.of.definition}; mean over the tuning seeds",
        "edge": "the end of the grid at which the best rate lies: beyond it may be a better one",
        "taken_by": "rows of the table that take the best overrides",
    }
    if not sweep.fit:
        columns["runner_up"] = "the overrides with the next mean"
    else:
        columns |= {
            "best": f"the rate at which a parabola in log lr is best, through {sweep.fit} rates around the best one, "
            "without those at which a trial diverged; one that was tried where it has no optimum between these rates",
            sweep.quantity: f"{sweep.of.definition}; of the parabola, for the mean over the tuning seeds",
            "interval": "95 % interval of the best rate by Fieller's theorem, within the rates that were tried; none: "
            "one of these was chosen",
            "scatter": "standard deviation of a trial about the parabola, without what a seed does to all its trials",
        }
    origin = [
        f"Trials: {len(records)} in [{name}.csv]({name}.csv); `seconds` from a run's first start to its end, pauses "
        "included",
        f"Chosen: [{name}.yaml]({name}.yaml), whose values the table's rows take",
        f"Centres: {', '.join(f'{method.name} {method.row.centre:g}' for method in methods)}",
        f"Hardware: {'; '.join(records['hardware'].unique())}",
        f"Date: {dates[0]} (first start) to {dates[-1]} (last start)",
        f"Commit: {'; '.join(records['commit'].unique())}",
        f"Made by `{command}`",
    ]
    picture = f"![final {sweep.quantity} against the learning rate]({name}.png)"
    parts = {"Columns": [f"`{key}`: {text}" for key, text in columns.items()], "Where the numbers come from": origin}
    return page(f"Tuning of {name}: {table.title}", note, f"{chosen}\n\n{picture}", "", parts)


def draw_sweep(table: Table, methods: Sequence[Method]) -> Figure:
    """Draw what was tuned against the learning rate, a panel for each variant and number of workers.

    A line is the mean over tuning seeds; bars go from the lowest to the highest seed, and crosses at the bottom are
    rates that diverged. A parabola ends where its fit does, and a bar at the bottom shows the interval of its optimum.
    """
    rows = list(dict.fromkeys(method.row for method in methods))
    names = {row: f"{name}, {row.topology.replace('_', ' ')}" for row, name in zip(rows, line_names(rows), strict=True)}
    lines, label = list(dict.fromkeys(names.values())), label_of(table.sweep.quantity)
    panels: dict[str, list[Method]] = {}
    for method in methods:
        workers = f"{method.row.workers} workers" if table.setting == "workers.count" else None
        panels.setdefault(", ".join(filter(None, [method.variant, workers])), []).append(method)
    height = 0.4 + 2.9 * len(panels) + 0.16 * -(-len(lines) // 2)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for (panel, shown), ax in zip(panels.items(), axes, strict=True):
        data = [
            (names[method.row], rate, value)
            for method in shown
            for rate in sorted(method.means)
            for value in method.values[rate]
        ]
        draw_lines(ax, pd.DataFrame(data, columns=["line", "rate", "value"]), "rate", "value", lines, spread=True)
        for number, method in enumerate(shown):
            colour = COLOURS[lines.index(names[method.row]) % len(COLOURS)]
            _draw_optimum(ax, method, colour, height=0.01 + 0.015 * number)
        ax.set(xlabel="learning rate", ylabel=f"{panel}: {label}" if panel else label)
        scale_log(ax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    count = len(table.sweep.seeds)
    seeds = f"mean of {count} seeds; bars: all of them" if count > 1 else "one seed"
    figure.suptitle(f"Tuning of {table.name} ({seeds})")
    return figure


def _draw_optimum(ax: Axes, method: Method, colour: str, height: float) -> None:
    """Draw crosses at rates that diverged, and the parabola, if there is one, with its interval at this height."""
    diverged, below = sorted({*method.values} - {*method.means}), ax.get_xaxis_transform()
    ax.plot(diverged, [0.02] * len(diverged), "x", color=colour, transform=below)
    if optimum := method.optimum:
        inside = np.geomspace(*optimum.span, 50)
        ax.plot(inside, np.polyval(optimum.parabola, np.log(inside)), color=colour)
        ax.plot([optimum.low, optimum.high], [height] * 2, color=colour, linewidth=2, transform=below)
