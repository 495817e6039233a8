"""Tables of benchmarks: results/definitions/benchmarks/<name>.yaml names records and published numbers."""

import itertools
from collections.abc import Collection
from pathlib import Path

import pandas as pd
from pandas.api.types import is_float_dtype
from pydantic import Field

from common.cli import UsageError, one_line
from common.experiments.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.benchmark import read_record
from common.report.published import load_published
from common.report.tables import FORMATS, csv_text, format_texts, latex, published_lines, write_files

BENCHMARKS = ROOT / "results" / "definitions" / "benchmarks"
LEFT = ("source", "cluster", "method", "topology")  # the columns that are aligned to the left
SOURCES = {"published": "as published, not measured here", "ours": "measured by the benchmark"}


class BenchmarkColumn(Definition):
    """A column of numbers: its definition, and its format for reading."""

    definition: str
    style: str


class Ratio(Definition):
    """A value over that of the row with these labels, on the same cluster with the same number of workers."""

    of: str
    over: dict[str, str]


class BenchmarkTable(Definition):
    """The content of results/definitions/benchmarks/<name>.yaml.

    cluster:   a template of the cluster's name, filled with a row's columns
    undefined: {method: {column: value}}: a method that does not exist where the record has these values
    """

    title: str
    note: str
    published: str
    records: str = Field(description="a file of results/benchmarks")
    command: str = Field(description="what writes it")
    cluster: str
    labels: dict[str, str] = Field(description="columns that tell rows apart, and their definitions")
    values: dict[str, BenchmarkColumn]
    ratio: Ratio
    undefined: dict[str, dict[str, int]] = Field(default_factory=dict)
    name: str


def load_benchmark(name: str, folder: Path = BENCHMARKS) -> BenchmarkTable:
    """Read a definition; raises UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="table")
    with explained(folder, name, BenchmarkTable):
        return BenchmarkTable.model_validate({**content, "name": name})


def benchmark_names(folder: Path = BENCHMARKS) -> list[str]:
    """Return the names of the tables that are made from benchmarks."""
    return names_in(folder)


def build_benchmark(table: BenchmarkTable, records: Path) -> pd.DataFrame:
    """Return published rows, then ours: source, cluster, labels, values and ratio; None where there is no number."""
    frame = pd.concat([load_published(table.published).frame().assign(source="published"), _ours(table, records)])
    frame = frame.reset_index(drop=True).reindex(columns=["source", "cluster", *table.labels, *table.values])
    frame[_ratio_name(table)] = _ratios(table, frame)
    # Beside published rows that lack them, whole numbers have become floats.
    whole = [name for name in table.labels if is_float_dtype(frame[name]) and (frame[name].dropna() % 1 == 0).all()]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    return frame.astype(object).where(frame.notna(), None)


def missing_records(table: BenchmarkTable, records: Path) -> list[str]:
    """Return a line for each cluster and number of workers that lacks a method, with the command that measures it.

    Methods are expected if they are published or, where none are, if another cluster has them.
    """
    if not (records / table.records).exists():
        return [f"all rows of ours: no {table.records}: {table.command}"]
    frame, (method,) = build_benchmark(table, records), table.ratio.over
    sources = dict(list(frame.dropna(subset=[method]).groupby("source")))
    wanted = sources.get("published", sources["ours"])[method].unique()
    lines = []
    for (cluster, workers), rows in _ours(table, records).groupby(["cluster", "workers"], sort=False):
        found = set(rows[method])
        absent = [name for name in wanted if name not in found and not _is_undefined(table, name, rows.iloc[0])]
        if absent:
            lines.append(f"{cluster}, {workers} workers: no {', '.join(absent)}: {table.command}")
    return lines


def show_benchmark(table: BenchmarkTable, records: Path, style: str = "simple") -> str:
    """Return the table as text."""
    return format_texts(readable_benchmark(table, build_benchmark(table, records)), style, LEFT)


def write_benchmark(
    table: BenchmarkTable, records: Path, folder: Path, command: str, formats: Collection[str] = FORMATS
) -> list[Path]:
    """Write <folder>/<table> in these formats and return the paths; `command` is what the user typed."""
    frame = build_benchmark(table, records)
    texts = readable_benchmark(table, frame)
    lines = [f"# {table.title}", "", table.note, "", format_texts(texts, "pipe", LEFT), "", "## Columns", ""]
    lines += [f"- {line}" for line in benchmark_definitions(table)]
    lines += ["", "## Published", "", *(f"- {line}" for line in published_lines([table.published]))]
    lines += ["", "## Where the numbers come from", ""]
    lines += [f"- {line}" for line in (*benchmark_origin(table, records), f"This table: `{command}`")]
    missing = missing_records(table, records)
    if missing:
        lines += ["", "## Missing", "", *(f"- {line}" for line in missing)]
    makers = {
        "csv": lambda: csv_text(frame),
        "md": lambda: "\n".join(lines) + "\n",
        "tex": lambda: latex(texts, LEFT, table.title, f"Made by {command}"),
    }
    return write_files(folder / table.name, makers, formats)


def benchmark_origin(table: BenchmarkTable, records: Path) -> list[str]:
    """Return lines on the origin of our numbers: the record's path, and the origin that it states."""
    record = (records / table.records).with_suffix(".md")
    about = read_record(record).origin if record.exists() else [f"Made by `{table.command}`"]
    return [f"Ours: `{records / table.records}`", *about]


def benchmark_definitions(table: BenchmarkTable) -> list[str]:
    """Return a line for each column: its name and definition."""
    over = ", ".join(table.ratio.over.values())
    columns = {
        "source": "; ".join(f"{name}: {text}" for name, text in SOURCES.items()),
        "cluster": "hardware and network",
        **table.labels,
        **{name: column.definition for name, column in table.values.items()},
        _ratio_name(table): f"{table.ratio.of} / that of {over} on the same cluster with as many workers",
    }
    return [f"`{name}`: {text}" for name, text in columns.items()]


def _ours(table: BenchmarkTable, records: Path) -> pd.DataFrame:
    path = records / table.records
    if not path.exists():
        return pd.DataFrame()
    try:
        frame = pd.read_csv(path)
        clusters = [table.cluster.format(**row) for row in frame.to_dict("records")]
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path}: cannot be read ({one_line(error)})") from None
    frame = frame.assign(source="ours", cluster=clusters)
    needed = *table.labels, *table.values, *itertools.chain(*table.undefined.values())
    absent = [name for name in needed if name not in frame]
    if absent:
        raise UsageError(f"{path}: expected columns {', '.join(absent)}")
    return frame


def _is_undefined(table: BenchmarkTable, method: str, row: pd.Series) -> bool:
    """Return whether the method does not exist on the cluster and number of workers of a record's row."""
    where = table.undefined.get(method, {})
    return bool(where) and all(row[column] == value for column, value in where.items())


def _ratio_name(table: BenchmarkTable) -> str:
    return f"{table.ratio.of}_ratio"


def _ratios(table: BenchmarkTable, frame: pd.DataFrame) -> list[float | None]:
    """Return each row's value over the baseline's; None where there is no baseline."""
    of, keys = table.ratio.of, ["source", "cluster", "workers"]
    is_baseline = pd.Series(True, index=frame.index)
    for column, value in table.ratio.over.items():
        is_baseline &= frame[column] == value
    baselines = frame[is_baseline].drop_duplicates(keys).set_index(keys)[of]
    below = [baselines.get(tuple(row)) for row in frame[keys].itertuples(index=False)]
    return [value / base if pd.notna(value) and base else None for value, base in zip(frame[of], below, strict=True)]


def readable_benchmark(table: BenchmarkTable, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table as texts; columns without any entry are left out."""
    styles = {name: column.style for name, column in table.values.items()} | {_ratio_name(table): ".3f"}
    shown = {}
    for name in frame.dropna(axis="columns", how="all").columns.union([table.ratio.of], sort=False):
        empty = "unknown" if name == table.ratio.of else ""
        shown[name] = [empty if v is None else format(v, styles.get(name, "")) for v in frame[name]]
    return pd.DataFrame(shown)
