"""Finished runs, read from their folders or from a table's two files, into which scripts.keep packs them.

A run's folder has config.yaml, environment.json, metrics.jsonl, summary.json and, if transformer.evaluate has scored
the test set, evaluation/. In runs.jsonl a kept run is one line: `run`, which is <row>[/<variant>]/seed_<k>, then
summary, config, environment and, if there is one, evaluation with the texts of its files. metrics.parquet has the rows
of all runs' metrics.jsonl. Lines and rows are sorted by `run`. A metric there is NaN where metrics.jsonl had null (a
number that is not finite), and null where it had no such metric.

pd.read_parquet("results/runs/table3_fair/metrics.parquet").query("run == 'accumadam_aer/seed_4'")
"""

import io
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, reduce
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from common.atomic import write_atomically
from common.cli import UsageError, one_line

EVALUATION = ("test.csv", "test.json")  # in its folder evaluation, by transformer.evaluate
RUNS, METRICS = "runs.jsonl", "metrics.parquet"


class RunError(ValueError):
    """A run folder that cannot be used; the message names the folder and the reason."""


@dataclass(frozen=True)
class Target:
    """A value that a validation metric is to reach."""

    metric: str
    value: float
    best: Literal["highest", "lowest"]

    def reached_by(self, value: float) -> bool:
        """Return whether a value of the metric is at least as good."""
        return value >= self.value if self.best == "highest" else value <= self.value


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    folder:       where it is, or would be if it were not kept in its table's two files
    config:       the whole configuration
    environment:  versions, hardware, commit, overrides, start and end
    summary:      the run's totals
    rows:         of metrics.jsonl, null where a row lacks a metric
    evaluation:   texts of the files that transformer.evaluate wrote, by name
    target:       of the table that the run was read for, if it has one
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    rows: pa.Table
    evaluation: dict[str, str] = field(default_factory=dict)
    target: Target | None = None
    _curves: dict[tuple[str, str], pd.DataFrame] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The rows with columns step, split, loss, ...; NaN for null and missing metrics; lists of workers as lists."""
        columns = {name: self.rows[name] for name in self.rows.column_names}
        recorded = {name: column for name, column in columns.items() if column.null_count < len(column)}
        return pd.DataFrame(
            {name: c.to_pylist() if pa.types.is_list(c.type) else c.to_pandas() for name, c in recorded.items()}
        )

    def curve(self, split: str, metric: str) -> pd.DataFrame:
        """Return a split's rows with columns step and `metric`; raises RunError if none were recorded."""
        if metric not in self.metrics:
            raise RunError(f"{self.folder}: metrics.jsonl records no {metric!r}")
        if split not in self._splits:
            raise RunError(f"{self.folder}: metrics.jsonl has no row with split {split!r}")
        if (split, metric) not in self._curves:
            self._curves[split, metric] = self._splits[split][["step", metric]]
        return self._curves[split, metric]

    @cached_property
    def _splits(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.metrics.groupby("split", sort=False)))

    def last(self, split: str, metric: str) -> float:
        """Return the metric in the last row of a split; raises RunError if none was recorded."""
        return float(self.curve(split, metric)[metric].iloc[-1])

    def test_scores(self) -> pd.DataFrame | None:
        """Return a line for each model that transformer.evaluate has scored on the test set; None before it has."""
        if "test.csv" not in self.evaluation:
            return None
        try:
            return pd.read_csv(io.StringIO(self.evaluation["test.csv"])).set_index("model")
        except (ValueError, KeyError) as error:
            raise RunError(f"{self.folder}: evaluation/test.csv: {one_line(error)}") from None

    def test_curve(self, score: str) -> pd.DataFrame:
        """Return step and `score` of the models kept during training; raises RunError if none has been scored."""
        scores = self.test_scores()
        kept = None if scores is None else scores[scores.index.str.startswith("step_")]
        if kept is None or kept.empty or score not in kept:
            raise RunError(
                f"{self.folder}: evaluation/test.csv has no {score!r} of the models kept in training; "
                f"python -m transformer.evaluate {shlex.quote(f'run={self.folder}')} makes it"
            )
        return kept.sort_values("step")[["step", score]].reset_index(drop=True)

    def setting(self, key: str) -> Any:
        """Return a setting by its key, as in optimizer.lr; raises RunError if config.yaml lacks it."""
        try:
            return reduce(lambda part, name: part[name], key.split("."), self.config)
        except (LookupError, TypeError):
            raise RunError(f"{self.folder}: config.yaml: {key}: missing") from None

    def total(self, key: str) -> float:
        """Return a number of summary.json, NaN for null; raises RunError if it is missing."""
        if key in self.summary and self.summary[key] is None:
            return math.nan
        value = self.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RunError(f"{self.folder}: summary.json: {key}={value!r}: expected a number")
        return float(value)


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run; raises RunError with folder and reason if it is missing, unfinished or broken."""
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
    return FinishedRun(
        folder=folder,
        # Everything in it is resolved, and OmegaConf takes ten times as long.
        config=_read(folder / "config.yaml", partial(yaml.load, Loader=yaml.CSafeLoader), "a mapping"),
        environment=read_json(folder / "environment.json"),
        summary=summary,
        rows=_read_metrics(folder / "metrics.jsonl"),
        evaluation=_read_evaluation(folder),
    )


def has_run(folder: Path) -> bool:
    """Return whether a run, finished or not, is in this folder or is kept for it."""
    return folder.is_dir() or find_kept(folder) is not None


def runs_below(folder: Path) -> list[Path]:
    """Return the sorted folders of all ended runs at or below a folder; for kept runs it need not exist."""
    packs = set(folders_with(folder, RUNS)) | {path for path in folder.parents if (path / RUNS).exists()}
    kept = [pack / name for pack in packs for name in read_pack(pack)]
    found = set(folders_with(folder, "summary.json"))
    return sorted(found.union(run for run in kept if run.is_relative_to(folder)))


def folders_with(root: Path, name: str) -> Iterator[Path]:
    """Yield the folders at or below `root` with a file of this name, not checkpoints, which may vanish meanwhile."""
    for folder, folders, files in os.walk(root):
        folders[:] = [inner for inner in folders if inner != "checkpoints"]
        if name in files:
            yield Path(folder)


def read_scores(folder: Path) -> str | None:
    """Return the text of a run's evaluation/test.csv, None if it has none."""
    kept = None if folder.is_dir() else find_kept(folder)
    return (kept.evaluation if kept else _read_evaluation(folder)).get("test.csv")


def read_status(folder: Path) -> str:
    """Return a run's status in summary.json, "diverged" for one that failed because its loss was not finite."""
    summary = read_json(folder / "summary.json")
    diverged = summary.get("status") == "failed" and str(summary.get("error")).startswith("DivergedError")
    return "diverged" if diverged else str(summary.get("status"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a run folder's file; raises RunError if it is missing or broken."""
    return _read(path, json.loads, "an object")


def _read(path: Path, parse: Callable[[str], Any], expected: str) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _broken(path, error) from None
    if not isinstance(content, dict):
        raise RunError(f"{path.parent}: {path.name}: expected {expected}, got {type(content).__name__}")
    return content


def read_overrides(folder: Path, environment: Mapping[str, object]) -> list[str]:
    """Return the overrides that a run's environment.json records; raises RunError if they are not texts."""
    recorded = environment.get("overrides")
    if not isinstance(recorded, list) or not all(isinstance(text, str) for text in recorded):
        raise RunError(f"{folder}: environment.json: overrides={recorded!r}: expected a list of texts")
    return recorded


def _read_evaluation(folder: Path) -> dict[str, str]:
    files = {name: folder / "evaluation" / name for name in EVALUATION}
    try:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: evaluation: {one_line(error)}") from None


def _read_metrics(path: Path) -> pa.Table:
    """Return the rows; a column has integers if all its values are integers."""
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
    keys = dict.fromkeys(key for record in records for key in record)
    try:
        return pa.table({key: [record.get(key) for record in records] for key in keys})
    except (pa.ArrowException, OverflowError) as error:
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> RunError:
    reason = "missing" if isinstance(error, FileNotFoundError) else one_line(error)
    return RunError(f"{path.parent}: {path.name}: {reason}")


# Kept runs.


def find_kept(folder: Path) -> FinishedRun | None:
    """Return the kept run that stands for a run folder; None if there is none. Raises UsageError for a broken file."""
    for table in folder.parents:
        if (table / RUNS).is_file():
            return read_pack(table).get(folder.relative_to(table).as_posix())
    return None


def read_pack(table: Path) -> Mapping[str, FinishedRun]:
    """Return a table's kept runs by name, {} without such files; raise UsageError naming a broken file."""
    if not (table / RUNS).exists():
        return {}
    changed = [(table / name).stat().st_mtime_ns for name in (RUNS, METRICS) if (table / name).exists()]
    return _read_pack(table, tuple(changed))


@lru_cache(maxsize=64)  # every cell of a table looks for its run here
def _read_pack(table: Path, changed: tuple[int, ...]) -> Mapping[str, FinishedRun]:
    try:
        rows = pq.read_table(table / METRICS).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{table / METRICS}: {one_line(error)}") from None
    runs = rows["run"].to_pandas()
    places = runs.groupby(runs).indices
    of_run = {name: rows.slice(at[0], len(at)).drop_columns("run") for name, at in places.items()}
    records = {}
    for number, line in enumerate((table / RUNS).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            run = json.loads(line)
            name, parts = run["run"], (run["config"], run["environment"], run["summary"])
            records[name] = FinishedRun(table / name, *parts, of_run[name], run.get("evaluation", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{table / RUNS}, line {number}: broken ({error!r})") from None
    return records


def write_pack(table: Path, runs: Mapping[str, FinishedRun]) -> None:
    """Write these runs, and runs kept earlier under other names, to a table's two files.

    Raises UsageError, before anything is written, if an existing file is broken.
    """
    runs = dict(sorted({**read_pack(table), **runs}.items()))
    lines = [
        json.dumps(
            {"run": name, "summary": run.summary, "config": run.config, "environment": run.environment}
            | ({"evaluation": run.evaluation} if run.evaluation else {})
        )
        for name, run in runs.items()
    ]
    named = [run.rows.add_column(0, "run", [[name] * len(run.rows)]) for name, run in runs.items()]
    rows = pa.concat_tables(named, promote_options="permissive").combine_chunks()
    numbers = [field.name for field in rows.schema if field.type in (pa.int64(), pa.float64())]
    file = io.BytesIO()
    size = {"compression": "zstd", "compression_level": 19, "use_byte_stream_split": numbers}
    pq.write_table(rows, file, use_dictionary=["run", "split"], **size)
    table.mkdir(parents=True, exist_ok=True)
    write_atomically(table / METRICS, file.getvalue())
    write_atomically(table / RUNS, "".join(f"{line}\n" for line in lines).encode())
