"""Tables of benchmarks: results/definitions/benchmarks/<name>.yaml names records and published numbers."""

from pathlib import Path

import pandas as pd
from pandas.api.types import is_float_dtype
from pydantic import Field

from common.cli import UsageError, one_line
from common.experiments.definitions import ROOT, Definition, load_definition
from common.report.published import load_published, published_lines
from common.report.tables import csv_text, markdown, page, write_texts

BENCHMARKS = ROOT / "results" / "definitions" / "benchmarks"
LEFT = ("source", "cluster", "method", "topology")  # the columns that are aligned to the left
KEYS = ["source", "cluster", "workers"]  # rows that agree in these were measured in the same way


class BenchmarkTable(Definition):
    """The content of results/definitions/benchmarks/<name>.yaml.

    cluster:  a template of the cluster's name, filled with a row's columns
    styles:   the numbers' formats for reading
    ratio:    the number also shown relative to the baseline's, on the same cluster with the same number of workers
    baseline: {column: the label that its row has}
    hidden:   columns that only the CSV file has
    """

    title: str
    note: str
    findings: str = Field(description="Markdown: what the kept record shows, for the page in results/tables")
    published: str
    records: str = Field(description="a file of results/benchmarks")
    command: str = Field(description="the command that writes the record")
    cluster: str
    labels: dict[str, str] = Field(description="columns that identify a row, with their definitions")
    values: dict[str, str] = Field(description="columns of numbers, with their definitions")
    styles: dict[str, str]
    ratio: str
    baseline: dict[str, str] = Field(min_length=1, max_length=1)
    hidden: tuple[str, ...]

    @property
    def ratio_name(self) -> str:
        """The name of the column of ratios."""
        return f"{self.ratio}_ratio"


def load_benchmark(name: str) -> BenchmarkTable:
    """Read a definition; raises UsageError naming file, key, value and expectation if it is unknown or wrong."""
    return load_definition(BENCHMARKS, name, BenchmarkTable, key="table")


def build_benchmark(table: BenchmarkTable, records: Path) -> pd.DataFrame:
    """Return the published rows and, below them, the record's rows if it exists.

    The columns are source, cluster, labels, values and ratio; None where there is no number.
    """
    frame = pd.concat([load_published(table.published).frame().assign(source="published"), _ours(table, records)])
    frame = frame.reset_index(drop=True).reindex(columns=["source", "cluster", *table.labels, *table.values])
    ((label, value),) = table.baseline.items()
    base = frame[frame[label] == value].drop_duplicates(KEYS).set_index(KEYS)[table.ratio].astype(float)
    frame[table.ratio_name] = frame[table.ratio].astype(float) / frame[KEYS].join(base.rename("base"), on=KEYS)["base"]
    # Whole numbers have become floats if published rows lack them.
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


def shown_benchmark(table: BenchmarkTable, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the shown columns as texts, without empty ones; an empty column `ratio` stays, as "unknown"."""
    styles, texts = table.styles | {table.ratio_name: ".3f"}, {}
    for name in frame.dropna(axis="columns", how="all").columns.union([table.ratio], sort=False):
        empty = "unknown" if name == table.ratio else ""
        if name not in table.hidden:
            texts[name] = [empty if v is None else format(v, styles.get(name, "")) for v in frame[name]]
    return pd.DataFrame(texts)


def write_benchmark(name: str, records: Path, folder: Path, command: str, kept: bool = False) -> list[Path]:
    """Write <folder>/<name>.csv and .md and return the paths; see `write_table`."""
    table = load_benchmark(name)
    frame = build_benchmark(table, records)
    ratio = f"{table.ratio} / that of {', '.join(table.baseline.values())} on the same cluster with as many workers"
    columns = {
        "source": "published: as published, not measured here; ours: measured by the benchmark",
        "cluster": "hardware and network",
        **table.labels,
        **table.values,
        table.ratio_name: ratio,
    }
    record = (records / table.records).with_suffix(".md")
    about = f"- Made by `{table.command}`\n"
    if record.exists():
        about = record.read_text(encoding="utf-8").partition("## Where the numbers come from\n")[2]
    origin = [line.removeprefix("- ") for line in about.splitlines() if line.startswith("- ")]
    parts = {
        "Columns": [f"`{column}`: {text}" for column, text in columns.items() if column not in table.hidden],
        "Published": published_lines([table.published]),
        "Where the numbers come from": [f"Ours: `{records / table.records}`", *origin, f"This table: `{command}`"],
        "Missing": missing_records(table, records),
    }
    links = f"[All columns]({name}.csv)" + f", [record](../benchmarks/{Path(table.records).stem}.md)" * kept
    texts = f"{markdown(shown_benchmark(table, frame), LEFT)}\n\n{links}"
    text = page(table.title, table.note, texts, table.findings if kept else "", parts)
    return write_texts(folder / name, {"csv": csv_text(frame), "md": text})
