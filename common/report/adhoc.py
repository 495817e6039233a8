"""Runs that belong to no table, side by side: the overrides in which they differ, and what they reached."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from common.cli import UsageError
from common.report.overrides import meaning
from common.report.runs import FinishedRun, RunError, read_overrides, read_run
from common.training.bookkeeping import is_bookkeeping

logger = logging.getLogger(__name__)
NO_METRIC = ("step", "split", "epoch", "bytes_sent", "time_step_ms")


def compare(folders: Sequence[Path]) -> pd.DataFrame:
    """Return a row of texts for each finished run in these folders, each a run or a folder of runs.

    The columns are the run's folder, every override that is not the same in all runs, the steps, the metrics of the
    last validation, and totals. Raises UsageError if no run is finished.
    """
    found = list(_finished(folders))
    if not found:
        raise UsageError(f"runs={','.join(map(str, folders))}: expected finished runs, or folders that hold some")
    runs, settings = zip(*found, strict=True)
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


def _finished(folders: Sequence[Path]) -> Iterator[tuple[FinishedRun, dict[str, Any]]]:
    for folder in folders:
        for summary in sorted(folder.rglob("summary.json")):
            try:
                run = read_run(summary.parent)
                yield run, _settings(run)
            except RunError as error:
                logger.warning("skipped %s", error)


def _settings(run: FinishedRun) -> dict[str, Any]:
    overrides = read_overrides(run.folder, run.environment)
    try:
        return meaning(overrides)
    except ValueError as error:
        raise RunError(f"{run.folder}: environment.json: overrides: {error}") from None
