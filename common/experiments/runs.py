"""Finished runs, read from their folders: config.yaml, environment.json, metrics.jsonl, summary.json."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from common.cli import one_line

FILES = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json")


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

    config:       the whole configuration
    environment:  versions, hardware, commit, overrides, start and end
    summary:      the run's totals
    metrics:      metrics.jsonl with columns step, split, loss, ... (NaN where a line has null or no such metric)
    target:       of the table that it was read for, if that has one
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: pd.DataFrame
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
        path = self.folder / "evaluation" / "test.csv"
        if not path.exists():
            return None
        try:
            return pd.read_csv(path).set_index("model")
        except (OSError, ValueError, KeyError) as error:
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
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder")
    if not (folder / "summary.json").exists():
        raise RunError(f"{folder}: not finished: no summary.json")
    summary, status = read_json(folder / "summary.json"), read_status(folder)
    if status != "finished":
        raise RunError(f"{folder}: not finished: status {status!r} at step {summary.get('steps')}")
    return FinishedRun(
        folder=folder,
        config=read_config(folder / "config.yaml"),
        environment=read_json(folder / "environment.json"),
        summary=summary,
        metrics=_read_metrics(folder / "metrics.jsonl"),
    )


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


def _read_metrics(path: Path) -> pd.DataFrame:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise _broken(path, error) from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
            split = str(record.pop("split"))
            numbers = {
                key: value for key, value in record.items() if split != "membership"
            }  # which has lists of workers
            if wrong := [key for key, value in numbers.items() if not isinstance(value, int | float)]:
                raise TypeError(f"{wrong[0]}: expected a number")
            records.append({"step": int(record["step"]), "split": split, **record})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(f"{path.parent}: metrics.jsonl, line {number}: broken ({error!r})") from None
    if not records:
        raise RunError(f"{path.parent}: metrics.jsonl is empty")
    return pd.DataFrame(records)


def _broken(path: Path, error: Exception) -> RunError:
    reason = "missing" if isinstance(error, FileNotFoundError) else one_line(error)
    return RunError(f"{path.parent}: {path.name}: {reason}")
