"""Finished runs, read from their folders (config.yaml, environment.json, metrics.jsonl, summary.json) or from packs."""

import io
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import yaml

from common.cli import one_line
from common.experiments.packs import METRICS, RUNS, RunFiles, find_kept, read_pack, table_of_rows

FILES = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json")
EVALUATION = ("test.csv", "test.json")  # in its folder evaluation, by transformer.evaluate


class RunError(ValueError):
    """A run folder that cannot be used; the message names the folder and the reason."""


@dataclass(frozen=True)
class Target:
    """A value that a validation metric is to reach."""

    metric: str
    value: float
    best: Literal["highest", "lowest"]

    def reached_by(self, value: float) -> bool:
        """Return whether a value of the metric is as good."""
        return value >= self.value if self.best == "highest" else value <= self.value


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    folder:       where it is, or would be if it were not kept in its table's two files (common.experiments.packs)
    config:       the whole configuration
    environment:  versions, hardware, commit, overrides, start and end
    summary:      the run's totals
    metrics:      metrics.jsonl with columns step, split, loss, ... (NaN where a line has null or no such metric)
    scores:       the text of evaluation/test.csv, if transformer.evaluate has scored the run
    target:       of the table that it was read for, if that has one
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: pd.DataFrame
    scores: str | None = None
    target: Target | None = None

    @property
    def seed(self) -> int:
        """The seed; raises RunError if the configuration has none."""
        seed = self.config.get("seed")
        if not isinstance(seed, int):
            raise RunError(f"{self.folder}: config.yaml: seed={seed!r}: expected an integer")
        return seed

    def curve(self, split: str, metric: str) -> pd.DataFrame:
        """Return a split's rows with columns step and `metric`; raises RunError if none were recorded."""
        return self._rows(split, metric)[["step", metric]]

    def test_scores(self) -> pd.DataFrame | None:
        """Return a line for each model that transformer.evaluate has scored on the test set; None before it has."""
        if self.scores is None:
            return None
        try:
            return pd.read_csv(io.StringIO(self.scores)).set_index("model")
        except (ValueError, KeyError) as error:
            raise RunError(f"{self.folder}: evaluation/test.csv: {one_line(error)}") from None

    def test_curve(self, score: str) -> pd.DataFrame:
        """Return step and `score` of the models kept in training; raises RunError if none has been scored."""
        scores = self.test_scores()
        kept = None if scores is None else scores[scores.index.str.startswith("step_")]
        if kept is None or kept.empty or score not in kept:
            raise RunError(
                f"{self.folder}: evaluation/test.csv has no {score!r} of the models kept in training; "
                f"python -m transformer.evaluate {shlex.quote(f'run={self.folder}')} makes it"
            )
        return kept.sort_values("step")[["step", score]].reset_index(drop=True)

    def last(self, split: str, metric: str) -> float:
        """Return the metric in the last row of a split; raises RunError if none was recorded."""
        return float(self._rows(split, metric)[metric].iloc[-1])

    def total(self, key: str) -> float:
        """Return a number of summary.json, NaN for null; raises RunError if it is missing."""
        if key in self.summary and self.summary[key] is None:
            return math.nan
        value = self.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RunError(f"{self.folder}: summary.json: {key}={value!r}: expected a number")
        return float(value)

    def _rows(self, split: str, metric: str) -> pd.DataFrame:
        if metric not in self.metrics:
            raise RunError(f"{self.folder}: metrics.jsonl records no {metric!r}")
        if split not in self._splits:
            raise RunError(f"{self.folder}: metrics.jsonl has no row with split {split!r}")
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.metrics.groupby("split", sort=False)))


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run; raises RunError with folder and reason if it is missing, unfinished or broken."""
    files = read_files(folder)
    recorded = [name for name in files.rows.column_names if files.rows[name].null_count < len(files.rows)]
    return FinishedRun(
        folder=folder,
        config=files.config,
        environment=files.environment,
        summary=files.summary,
        metrics=pd.DataFrame({name: _values(files.rows[name]) for name in recorded}),
        scores=files.evaluation.get("test.csv"),
    )


def read_files(folder: Path) -> RunFiles:
    """Return the content of a finished run's files; raises RunError as `read_run` does."""
    if not folder.is_dir():
        kept = find_kept(folder)
        if kept is None:
            raise RunError(f"{folder}: no such folder")
        return kept
    if not (folder / "summary.json").exists():
        raise RunError(f"{folder}: not finished: no summary.json")
    summary, status = read_json(folder / "summary.json"), read_status(folder)
    if status != "finished":
        raise RunError(f"{folder}: not finished: status {status!r} at step {summary.get('steps')}")
    return RunFiles(
        summary=summary,
        config=read_config(folder / "config.yaml"),
        environment=read_json(folder / "environment.json"),
        evaluation=_read_evaluation(folder),
        rows=_read_metrics(folder / "metrics.jsonl"),
    )


def has_run(folder: Path) -> bool:
    """Return whether a run, finished or not, is in this folder or is kept for it."""
    return folder.is_dir() or find_kept(folder) is not None


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of all ended runs in a folder, sorted; also of kept ones, for which it may stand."""
    packs = {path.parent for path in folder.rglob(RUNS)} | {path for path in folder.parents if (path / RUNS).exists()}
    kept = [pack / name for pack in packs for name in read_pack(pack)]
    found = {path.parent for path in folder.rglob("summary.json")}
    return sorted(found.union(run for run in kept if run.is_relative_to(folder)))


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files that have what a run recorded, by their names."""
    if folder.is_dir():
        return {name: folder / name for name in FILES}
    pack = next((path for path in folder.parents if (path / RUNS).exists()), folder)
    return {name: pack / name for name in (RUNS, METRICS)}


def read_scores(folder: Path) -> str | None:
    """Return the text of a run's evaluation/test.csv, None if it has none."""
    if folder.is_dir():
        return _read_evaluation(folder).get("test.csv")
    kept = find_kept(folder)
    return kept and kept.evaluation.get("test.csv")


def read_status(folder: Path) -> str:
    """Return a run's status in summary.json, "diverged" for one that failed because its loss was not finite."""
    summary = read_json(folder / "summary.json")
    diverged = summary.get("status") == "failed" and str(summary.get("error")).startswith("DivergedError")
    return "diverged" if diverged else str(summary.get("status"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a run folder's file; raises RunError if it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, error) from None
    if not isinstance(content, dict):
        raise RunError(f"{path.parent}: {path.name}: expected an object, got {type(content).__name__}")
    return content


def read_overrides(folder: Path, environment: Mapping[str, object]) -> list[str]:
    """Return the overrides that a run's environment.json records; raises RunError if they are no texts."""
    recorded = environment.get("overrides")
    if not isinstance(recorded, list) or not all(isinstance(text, str) for text in recorded):
        raise RunError(f"{folder}: environment.json: overrides={recorded!r}: expected a list of texts")
    return recorded


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's config.yaml, in which all is resolved; raises RunError if it is missing or broken."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)  # OmegaConf takes ten times as long
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _broken(path, error) from None
    if not isinstance(content, dict):
        raise RunError(f"{path.parent}: {path.name}: expected a mapping, got {type(content).__name__}")
    return content


def _read_evaluation(folder: Path) -> dict[str, str]:
    files = {name: folder / "evaluation" / name for name in EVALUATION}
    try:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: evaluation: {one_line(error)}") from None


def _read_metrics(path: Path) -> pa.Table:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise _broken(path, error) from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
            split = str(record.pop("split"))
            numbers = {} if split == "membership" else record  # which has lists of workers
            if wrong := [key for key, value in numbers.items() if not isinstance(value, int | float)]:
                raise TypeError(f"{wrong[0]}: expected a number")
            records.append({"step": int(record.pop("step")), "split": split, **record})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(f"{path.parent}: metrics.jsonl, line {number}: broken ({error!r})") from None
    if not records:
        raise RunError(f"{path.parent}: metrics.jsonl is empty")
    try:
        return table_of_rows(records)
    except ValueError as error:
        raise _broken(path, error) from None


def _values(column: pa.ChunkedArray) -> list[Any] | pd.Series:
    """Return a metric of all rows, NaN where a row lacks it; lists of workers as lists."""
    return column.to_pylist() if pa.types.is_list(column.type) else column.to_pandas()


def _broken(path: Path, error: Exception) -> RunError:
    reason = "missing" if isinstance(error, FileNotFoundError) else one_line(error)
    return RunError(f"{path.parent}: {path.name}: {reason}")
