"""Records of benchmarks: their texts, and rows of their CSV files or of kept tables, as pages show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pydantic import Field

from common.cli import UsageError
from common.experiments.definitions import ROOT, Definition

RECORDS = ROOT / "results" / "benchmarks"
COLUMNS, ORIGIN = "Columns", "Where the numbers come from"  # headings of a record


@dataclass(frozen=True)
class RecordText:
    """The text of a benchmark's .md without its table; `findings` are the paragraphs and points above that."""

    title: str
    findings: Sequence[str]
    definitions: Sequence[str]
    origin: Sequence[str]


def read_record(path: Path) -> RecordText:
    """Read <name>.md as `Benchmark.write` of scripts.benchmarks.record wrote it."""
    head, *rest = path.read_text(encoding="utf-8").split("\n## ")
    title, *above = head.split("\n", 1)
    parts = dict(part.split("\n", 1) for part in rest)
    above = [line.removeprefix("- ") for line in above[0].splitlines() if line and not line.startswith("|")]
    return RecordText(title.removeprefix("# "), above, _points(parts[COLUMNS]), _points(parts[ORIGIN]))


def _points(text: str) -> list[str]:
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]


class Baseline(Definition):
    """What a row is compared with: the row that `where` (a query) finds among those with equal values in `by`."""

    where: str
    by: list[str]


class RecordRows(Definition):
    """Rows of a CSV file.

    where:    the rows, as a query of pandas
    join:     other files, whose columns are added where all of `on` agree; columns that both have get an ending
    medians:  columns that tell rows apart; other numbers become medians over the `n` rows that agree in these
    baseline: adds columns `<number>_ratio`, a row's number over the baseline's
    assign:   more columns, as expressions of pandas
    """

    record: str | None = Field(None, description="a CSV file, without its ending, as seen from results/benchmarks")
    where: str | None = None
    join: dict[str, list[str]] = Field({}, description="other such files: {file: columns that agree}")
    medians: list[str] = Field(default_factory=list)
    baseline: Baseline | None = None
    assign: dict[str, str] = Field({})

    def frame(self) -> pd.DataFrame:
        """Return the rows; UsageError if there is no such record."""
        frame = _read(self.record)
        for other, columns in self.join.items():
            frame = frame.merge(_read(other), on=columns, suffixes=("", f"_of_{Path(other).name}"))
        if self.where:
            frame = frame.query(self.where, engine="python")
        if self.medians:
            groups = frame.groupby(self.medians, sort=False)
            frame = groups.median(numeric_only=True).assign(n=groups.size()).reset_index()
        if self.baseline:
            by = self.baseline.by
            numbers = [name for name in frame.select_dtypes("number") if name not in by]
            base = frame.query(self.baseline.where, engine="python")[[*by, *numbers]]
            frame = frame.merge(base, on=by, how="left", suffixes=("", "_ratio"))
            for name in numbers:
                frame[f"{name}_ratio"] = frame[name] / frame[f"{name}_ratio"]
        more = {name: frame.eval(expression, engine="python") for name, expression in self.assign.items()}
        return frame.copy().assign(**more)  # a copy is in one piece, else pandas warns of a fragmented one


def _read(record: str) -> pd.DataFrame:
    path = RECORDS / f"{record}.csv"
    if not path.exists():
        raise UsageError(f"{path}: no such record")
    return pd.read_csv(path)
