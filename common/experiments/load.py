"""Runs as pandas frames, for your own analysis: the runs of a table, or all runs below some folders.

runs, metrics = load("table3_fair")
runs.groupby(["method", "topology"])["top1"].agg(["mean", "std", "count"])
metrics.query("split == 'validation'").groupby(["row", "step"])["accuracy"].mean().unstack("row").plot()
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from common.cli import DEFAULT_RUNS, UsageError
from common.config.base import is_bookkeeping
from common.experiments.collect import collect
from common.experiments.definitions import meaning
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, read_overrides, read_run, runs_below
from common.experiments.tables import load_table

logger = logging.getLogger(__name__)
NO_METRIC = ("step", "split", "epoch", "bytes_sent", "time_step_ms")


def load(table: str, *roots: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table's finished runs, one per line, and their metrics, one line per row of metrics.jsonl.

    roots: the folders that hold the runs (default: runs and results/runs)

    Runs have the columns row, variant, seed, method, topology, the table's labels, workers, folder, and all quantities
    of common.experiments.quantities (NaN where a run has no such number); metrics have row, variant, seed, step, split
    and all else in metrics.jsonl. Raises UsageError for an unknown table, and if no run is finished.
    """
    collection = collect(load_table(table), *map(Path, roots or DEFAULT_RUNS))
    rows = {row.name: row for row in collection.table.rows}
    lines, metrics = [], []
    for key in collection.frame[["row", "variant", "seed", "run"]].to_dict("records"):
        run, row = key.pop("run"), rows[key["row"]]
        about = {"method": row.method, "topology": row.topology, **row.labels, "workers": int(run.total("workers"))}
        numbers = {name: quantity.number_of(run) for name, quantity in QUANTITIES.items()}
        lines.append(key | about | {"folder": str(run.folder)} | numbers)
        metrics.append(run.metrics.drop(columns=list(key), errors="ignore").assign(**key))
    every = pd.concat(metrics, ignore_index=True)
    return pd.DataFrame(lines), every[["row", "variant", "seed", *every.columns.drop(["row", "variant", "seed"])]]


def compare(folders: Sequence[Path]) -> pd.DataFrame:
    """Return a row of texts for each finished run in these folders, which are runs or hold runs.

    The columns are the run's folder, every override that is not the same in all runs, the steps, the metrics of the
    last validation, and totals. Raises UsageError if no run is finished.
    """
    runs, settings = [], []
    for path in (path for folder in folders for path in runs_below(folder)):
        try:
            run = read_run(path)
            settings.append(meaning(read_overrides(path, run.environment)))
            runs.append(run)
        except ValueError as error:
            reason = error if isinstance(error, RunError) else f"{path}: environment.json: overrides: {error}"
            logger.warning("skipped %s", reason)
    if not runs:
        raise UsageError(f"runs={','.join(map(str, folders))}: expected finished runs, or folders that hold some")
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if not is_bookkeeping(key)]
    keys = [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]
    rows = []
    for run, each in zip(runs, settings, strict=True):
        last = run.metrics[run.metrics["split"] == "validation"].iloc[-1:].dropna(axis="columns").to_dict("records")
        metrics = {name: value for row in last for name, value in row.items() if name not in NO_METRIC}
        totals = {name: run.summary.get(name) for name in ("bytes_sent", "time_step_ms")}
        overrides = {key: each.get(key) for key in keys}
        rows.append({"run": str(run.folder), **overrides, "steps": run.summary.get("steps"), **metrics, **totals})
    return pd.DataFrame(rows, dtype=object).map(_text)


def _text(value: object) -> str:
    if value is None or value != value:  # NaN: a run without this metric
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
