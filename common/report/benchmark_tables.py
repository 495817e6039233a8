"""Tables of benchmarks: results/definitions/benchmarks/<name>.yaml names records and published numbers."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd
from pandas.api.types import is_float_dtype
from pydantic import Field

from common.cli import UsageError, one_line
from common.experiments.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.published import load_published
from common.report.records import read_record
from common.report.tables import FORMATS, csv_text, latex, markdown, page, published_lines, write_files

BENCHMARKS = ROOT / "results" / "definitions" / "benchmarks"
LEFT = ("source", "cluster", "method", "topology")  # the columns that are aligned to the left
KEYS = ["source", "cluster", "workers"]  # of what is measured in the same way


class BenchmarkTable(Definition):
    """The content of results/definitions/benchmarks/<name>.yaml.

    cluster:  a template of the cluster's name, filled with a row's columns
    styles:   the numbers' formats for reading
    ratio:    the number that is shown over the baseline's, on the same cluster with the same number of workers
    baseline: {column: the label that its row has}
    hidden:   columns that only the CSV file has
    """

    title: str
    note: str
    findings: str = Field(description="Markdown: what the kept record shows, for the page in results/tables")
    published: str
    records: str = Field(description="a file of results/benchmarks")
    command: str = Field(description="what writes it")
    cluster: str
    labels: dict[str, str] = Field(description="columns that tell rows apart, and their definitions")
    values: dict[str, str] = Field(description="columns of numbers, and their definitions")
    styles: dict[str, str]
    ratio: str
    baseline: dict[str, str] = Field(min_length=1, max_length=1)
    hidden: tuple[str, ...]
    name: str

    @property
    def ratio_name(self) -> str:
        """The name of the column of ratios."""
        return f"{self.ratio}_ratio"


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
    ((label, value),) = table.baseline.items()
    base = frame[frame[label] == value].drop_duplicates(KEYS).set_index(KEYS)[table.ratio].astype(float)
    frame[table.ratio_name] = frame[table.ratio].astype(float) / frame[KEYS].join(base.rename("base"), on=KEYS)["base"]
    # Beside published rows that lack them, whole numbers have become floats.
    whole = [name for name in table.labels if is_float_dtype(frame[name]) and (frame[name].dropna() % 1 == 0).all()]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    return frame.astype(object).where(frame.notna(), None)


def _ours(table: BenchmarkTable, records: Path) -> pd.DataFrame:
    path = records / table.records
    if not path.exists():
        return pd.DataFrame()
    try:
        frame = pd.read_csv(path)
        clusters = [table.cluster.format(**row) for row in frame.to_dict("records")]
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path}: cannot be read ({one_line(error)})") from None
    absent = [name for name in (*table.labels, *table.values) if name not in frame]
    if absent:
        raise UsageError(f"{path}: expected columns {', '.join(absent)}")
    return frame.assign(source="ours", cluster=clusters)


def missing_records(table: BenchmarkTable, records: Path) -> list[str]:
    """Return a line on the record if it has not been made, with the command that makes it."""
    exists = (records / table.records).exists()
    return [] if exists else [f"all rows of ours: no {table.records}: {table.command}"]


def readable_benchmark(table: BenchmarkTable, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that are shown as texts; those without any entry are left out."""
    styles = table.styles | {table.ratio_name: ".3f"}
    shown = {}
    for name in frame.dropna(axis="columns", how="all").columns.union([table.ratio], sort=False):
        empty = "unknown" if name == table.ratio else ""
        if name not in table.hidden:
            shown[name] = [empty if v is None else format(v, styles.get(name, "")) for v in frame[name]]
    return pd.DataFrame(shown)


def write_benchmark(
    table: BenchmarkTable,
    records: Path,
    folder: Path,
    command: str,
    formats: Collection[str] = FORMATS,
    kept: bool = False,
) -> list[Path]:
    """Write <folder>/<table> in these formats and return the paths; see `write_table`."""
    frame = build_benchmark(table, records)
    texts = readable_benchmark(table, frame)
    parts = {
        "Columns": benchmark_definitions(table),
        "Published": published_lines([table.published]),
        "Where the numbers come from": [*benchmark_origin(table, records), f"This table: `{command}`"],
        "Missing": missing_records(table, records),
    }
    links = f"[All columns]({table.name}.csv)" + f", [record](../benchmarks/{Path(table.records).stem}.md)" * kept
    makers = {
        "csv": lambda: csv_text(frame),
        "md": lambda: page(
            table.title, table.note, f"{markdown(texts, LEFT)}\n\n{links}", table.findings if kept else "", parts
        ),
        "tex": lambda: latex(texts, LEFT, table.title, f"Made by {command}"),
    }
    return write_files(folder / table.name, makers, formats)


def benchmark_origin(table: BenchmarkTable, records: Path) -> list[str]:
    """Return lines on the origin of our numbers: the record's path, and the origin that it states."""
    record = (records / table.records).with_suffix(".md")
    about = read_record(record).origin if record.exists() else [f"Made by `{table.command}`"]
    return [f"Ours: `{records / table.records}`", *about]


def benchmark_definitions(table: BenchmarkTable) -> list[str]:
    """Return a line for each column that is shown."""
    columns = {
        "source": "published: as published, not measured here; ours: measured by the benchmark",
        "cluster": "hardware and network",
        **table.labels,
        **table.values,
        table.ratio_name: f"{table.ratio} / that of {', '.join(table.baseline.values())} on the same cluster with "
        "as many workers",
    }
    return [f"`{name}`: {text}" for name, text in columns.items() if name not in table.hidden]
