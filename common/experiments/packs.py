"""Kept runs, those of a table in two files: runs.jsonl has a line for each run, metrics.parquet the rows of all.

A line has `run`, which is <row>[/<variant>]/seed_<k>, then summary, config, environment and, if the run has scores of
the test set, evaluation: the texts of these files. Lines and rows are sorted by `run`. In metrics.parquet a metric is
NaN where metrics.jsonl had null, a number that is not finite, and null where it had no such metric.

pd.read_parquet("results/runs/table3_fair/metrics.parquet").query("run == 'accumadam_aer/seed_4'")
"""

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.atomic import write_atomically
from common.cli import UsageError, one_line

RUNS, METRICS = "runs.jsonl", "metrics.parquet"


@dataclass(frozen=True)
class RunFiles:
    """What a run left: the content of its files.

    evaluation:  texts of the files that transformer.evaluate wrote, by name
    rows:        of metrics.jsonl
    """

    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    evaluation: dict[str, str]
    rows: pa.Table


def table_of_rows(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return rows of metrics as a table, null where a row lacks a key; ValueError if a column mixes numbers and others.

    A column is of integers if all its values are.
    """
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row)
    try:
        return pa.table({key: [row.get(key) for row in rows] for key in keys})
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(str(error)) from None


def find_kept(folder: Path) -> RunFiles | None:
    """Return the kept run that stands for a run folder; None if there is none. Raises UsageError for a broken file."""
    for table in folder.parents:
        if (table / RUNS).is_file():
            return read_pack(table).get(folder.relative_to(table).as_posix())
    return None


def read_pack(table: Path) -> Mapping[str, RunFiles]:
    """Return a table's kept runs by name, none without such files; UsageError naming a broken file."""
    if not (table / RUNS).exists():
        return {}
    return _read(table, tuple((table / name).stat().st_mtime_ns for name in (RUNS, METRICS) if (table / name).exists()))


@lru_cache(maxsize=64)  # every cell of a table looks for its run here
def _read(table: Path, changed: tuple[int, ...]) -> Mapping[str, RunFiles]:
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
            parts = (run["summary"], run["config"], run["environment"], run.get("evaluation", {}))
            records[run["run"]] = RunFiles(*parts, of_run[run["run"]])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{table / RUNS}, line {number}: broken ({error!r})") from None
    return records


def write_pack(table: Path, records: Mapping[str, RunFiles]) -> None:
    """Write these runs, and those that are kept already under other names, to a table's two files.

    Raises UsageError, before anything is written, if a file that is there is broken.
    """
    records = dict(sorted({**read_pack(table), **records}.items()))
    lines = [
        json.dumps(
            {"run": name, "summary": record.summary, "config": record.config, "environment": record.environment}
            | ({"evaluation": record.evaluation} if record.evaluation else {})
        )
        for name, record in records.items()
    ]
    named = [record.rows.add_column(0, "run", [[name] * len(record.rows)]) for name, record in records.items()]
    rows = pa.concat_tables(named, promote_options="permissive").combine_chunks()
    numbers = [field.name for field in rows.schema if field.type in (pa.int64(), pa.float64())]
    file = io.BytesIO()
    size = {"compression": "zstd", "compression_level": 19, "use_byte_stream_split": numbers}
    pq.write_table(rows, file, use_dictionary=["run", "split"], **size)
    table.mkdir(parents=True, exist_ok=True)
    write_atomically(table / METRICS, file.getvalue())
    write_atomically(table / RUNS, "".join(f"{line}\n" for line in lines).encode())
