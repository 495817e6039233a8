"""The origin of a table's numbers, read from the runs' own files."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from common.experiments.collect import Collection
from common.experiments.runs import FinishedRun
from common.experiments.sweeps import sweep_command
from common.experiments.tables import Table


def describe_origin(collection: Collection) -> list[str]:
    """Return lines on folders, hardware, software, dates, commits, workers and evaluation.

    Where runs differ, each value is given with the number of runs that have it.
    """
    runs = collection.all_runs
    if not runs:
        return []

    def census(describe: Callable[[FinishedRun], str]) -> str:
        counts = Counter(map(describe, runs))
        several = [f"{text} ({count} of {len(runs)} runs)" for text, count in counts.items()]
        return "; ".join(several if len(counts) > 1 else counts)

    def folder(run: FinishedRun) -> str:
        return next((str(root) for root in collection.roots if run.folder.is_relative_to(root)), str(run.folder))

    starts, ends = (sorted(str(run.environment.get(key)) for run in runs) for key in ("start", "end"))
    return [
        f"Folder: {census(folder)}",
        f"Hardware: {census(lambda run: describe_hardware(run.environment))}",
        f"Software: {census(lambda run: _settings(run.environment.get('versions'), separator=' '))}",
        f"Date: {starts[0]} (first start) to {ends[-1]} (last end)",
        f"Commit: {census(lambda run: describe_commit(run.environment))}",
        f"Workers: {census(lambda run: _settings(run.config.get('workers')))}",
        f"Evaluation: {census(lambda run: _settings(run.config.get('evaluation')))}",
        *_tuned(collection.table),
    ]


def _tuned(table: Table) -> list[str]:
    """Return a line on each method's tuned values, and where its trials are; none if the table is not tuned."""
    if table.tuned is None:
        return []
    quantity, lines, by = table.tuned.sweep.of, [], table.tuned_by or table.name
    for name, tuned in table.tuned.methods.items():
        values = f"{' '.join(tuned.best.overrides)}, {quantity.name} {tuned.best.mean:{quantity.style}}"
        edge = f", the {tuned.edge} learning rate that was tried" if tuned.edge else ""
        lines.append(f"Tuned: {name}: {values} on seeds that are not reported, best of {tuned.trials} trials{edge}")
    return [*lines, f"Trials: results/sweeps/{by}.md and .csv, made by `{sweep_command(by)}`"]


def describe_hardware(environment: Mapping[str, Any]) -> str:
    """Return processor, cores and GPUs as text, from a run's environment.json."""
    hardware = environment.get("hardware") or {}
    names = Counter(map(str, hardware.get("gpus") or []))
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
    return f"{hardware.get('cpu', 'unknown CPU')}, {hardware.get('cores', '?')} cores, {gpus}"


def describe_commit(environment: Mapping[str, Any]) -> str:
    """Return the commit, and whether there were uncommitted changes, from a run's environment.json."""
    commit = environment.get("git_commit") or "unknown"
    return f"{commit} with uncommitted changes" if environment.get("git_dirty") else str(commit)


def _settings(values: Mapping[str, Any] | None, separator: str = "=") -> str:
    return ", ".join(f"{key}{separator}{value}" for key, value in (values or {}).items()) or "not recorded"
