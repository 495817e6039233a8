"""What a sweep leaves in results/sweeps: <table>.csv, .yaml, .md and .png."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from common.atomic import write_atomically
from common.experiments.sweeps import RATE, Tuned, TunedFile
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.choices import Method
from common.report.lines import draw_sweep
from common.report.origin import describe_commit, describe_hardware
from common.report.style import save
from common.report.tables import csv_text, format_texts

LEFT = ("method", "topology", "variant", "best", "runner_up", "edge", "taken_by")


def write_sweep(table: Table, methods: Sequence[Method], folder: Path, command: str) -> list[Path]:
    """Write all files of a sweep whose trials have ended; return their paths. `command` is what the user typed.

    Raises UsageError, before anything is written, if all trials of a method diverged.
    """
    tuned = TunedFile(sweep=table.sweep, methods={method.name: method.tuned for method in methods})
    records = trial_records(table, methods)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "csv": csv_text(records),
        "md": _render(table, methods, records, command),
        "yaml": tuned_text(tuned, command),
    }
    files = [folder / f"{table.name}.{suffix}" for suffix in texts]
    for file, text in zip(files, texts.values(), strict=True):
        write_atomically(file, text.encode())
    return [*files, *save(lambda: draw_sweep(table, methods), folder, table.name)]


def tuned_text(tuned: TunedFile, command: str) -> str:
    """Return the content of <table>.yaml."""
    content = OmegaConf.to_yaml(OmegaConf.create(tuned.model_dump(mode="json", exclude_none=True, by_alias=True)))
    return f"# Made by `{command}`: the rows of the table take the best overrides.\n{content}"


def trial_records(table: Table, methods: Sequence[Method]) -> pd.DataFrame:
    """Return a row for each trial, in the order of the grid."""
    keys = list(dict.fromkeys(key for method in methods for key in (RATE, *method.axes)))
    return pd.DataFrame(
        [
            {
                "row": method.row.name,
                **({"variant": method.variant} if table.variants else {}),
                **dict.fromkeys(keys, ""),
                **dict(text.split("=", 1) for text in result.overrides),
                "seed": trial.seed,
                table.sweep.quantity: trial.value,
                "status": "diverged" if trial.value is None else "finished",
                "steps": trial.steps,
                "seconds": round(trial.seconds),
                "commit": describe_commit(trial.environment),
                "hardware": describe_hardware(trial.environment),
                "date": trial.environment["start"],
            }
            for method in methods
            for result in method.results
            for trial in result.trials
        ],
        dtype=object,  # pandas would turn None (diverged) into NaN
    )


def sweep_frame(table: Table, tuned: Mapping[str, Tuned]) -> pd.DataFrame:
    """Return the table of what a sweep chose, {method: what}, as texts."""
    rows = [(row, variant) for row in table.rows if row.centre is not None for variant in table.variants or [None]]
    return pd.DataFrame([_row(table, row, variant, tuned[table.method(row, variant)]) for row, variant in rows])


def _row(table: Table, row: Row, variant: str | None, tuned: Tuned) -> dict[str, str]:
    return {
        "method": row.method,
        "topology": row.topology,
        **row.labels,
        **({"workers": str(row.workers)} if table.setting == "workers.count" else {}),
        **({"variant": str(variant)} if table.variants else {}),
        **_chosen(table, tuned),
        "edge": ", ".join(filter(None, [tuned.edge, *(tuned.ends or ())])),
        "taken_by": _taken_by(table, table.method(row, variant)),
    }


def _chosen(table: Table, tuned: Tuned) -> dict[str, str]:
    quantity, others = table.sweep.of, tuned.runner_up
    return {
        "trials": str(tuned.trials),
        "diverged": str(tuned.diverged),
        "best": " ".join(tuned.best.overrides),
        quantity.name: format(tuned.best.mean, quantity.style),
        "runner_up": " ".join(others.overrides) if others else "",
        f"{quantity.name}_of_runner_up": format(others.mean, quantity.style) if others else "",
        **(_by_parabola(tuned, quantity.style) if table.sweep.fit else {}),
    }


def _by_parabola(tuned: Tuned, style: str) -> dict[str, str]:
    if tuned.interval is None:
        return {"interval": "none", "scatter": ""}
    return {"interval": "{:.3g} to {:.3g}".format(*tuned.interval), "scatter": format(tuned.scatter, style)}


def _taken_by(table: Table, name: str) -> str:
    """Return the rows that take the values kept under this name."""
    rows = [row.name for row in table.rows for v in table.variants or [None] if table.method(row, v) == name]
    return ", ".join(rows)


def column_definitions(table: Table) -> dict[str, str]:
    """Return what the columns of a sweep's table mean."""
    quantity, fit = table.sweep.of, table.sweep.fit
    best = f"the overrides with the {table.sweep.best} mean; of equal ones the nearest to the centre"
    parabola = {
        "best": f"the rate at which a parabola in log lr is best, through {fit} rates around the best one, "
        "without those at which a trial diverged, and the values on other axes whose parabola is best; a point where "
        "no parabola has an optimum between these rates",
        quantity.name: f"{quantity.definition}; of the parabola, for the mean over the tuning seeds",
        "runner_up": "the next values on other axes, with the best rate for them",
        "interval": "95 % interval of the best rate by Fieller's theorem, within the rates that were tried; the choice "
        "of values on other axes is not counted; none: a point was chosen",
        "scatter": "standard deviation of a trial about the parabola, without what a seed does to all its trials",
    }
    return {
        "trials": "number of runs, the same for every method",
        "diverged": "how many of them diverged; their values count as the worst",
        "best": best,
        quantity.name: f"{quantity.definition}; mean over the tuning seeds",
        "runner_up": "the overrides with the next mean",
        "edge": "the end of the grid at which the best rate lies, or of three or more numbers on another axis: beyond "
        "it may be a better one",
        **(parabola if fit else {}),
        "taken_by": "rows of the table that take the best overrides",
    }


def _listed(axes: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{key} {', '.join(values)}" for key, values in axes.items())


def _render(table: Table, methods: Sequence[Method], records: pd.DataFrame, command: str) -> str:
    sweep, grid, name = table.sweep, methods[0].grid, table.name
    grown = (grid.high - grid.low + 1) - sweep.rates
    seeds, dates = ", ".join(map(str, sweep.seeds)), sorted(records["date"])
    points = f"{len(methods[0].results)} points: learning rates centre x 2^k, k = {grid.low} to {grid.high}"
    axes = {method.name: _listed(method.axes) for method in methods if method.axes}
    drawn = len(table.sweep.combinations(methods[0].axes))
    lines = [
        f"# Tuning of {name}: {table.title}",
        "",
        f"Every method was trained at {points}{f', each with {drawn} combinations of values' * bool(axes)}; seeds "
        f"{seeds}, none of which the table reports.",
        "",
        "The grid grows, for all methods alike, while one of them is best at an edge, at most "
        f"{sweep.extensions} times; rates added: {grown}.",
        "",
        format_texts(sweep_frame(table, {method.name: method.tuned for method in methods}), "pipe", LEFT),
        "",
        f"![final {sweep.quantity} against the learning rate]({name}.png)",
        "",
        "## Columns",
        "",
        *(f"- `{column}`: {definition}" for column, definition in column_definitions(table).items()),
        "",
        "## Where the numbers come from",
        "",
        f"- Trials: {len(records)} in [{name}.csv]({name}.csv); `seconds` from a run's first start to its end, pauses "
        "included",
        f"- Chosen: [{name}.yaml]({name}.yaml), whose values the table's rows take",
        f"- Centres: {', '.join(f'{method.name} {method.row.centre:g}' for method in methods)}",
        *(f"- Axes of {method}: {values}" for method, values in axes.items()),
        f"- Hardware: {'; '.join(records['hardware'].unique())}",
        f"- Date: {dates[0]} (first start) to {dates[-1]} (last start)",
        f"- Commit: {'; '.join(records['commit'].unique())}",
        f"- Made by `{command}`",
    ]
    return "\n".join(lines) + "\n"
