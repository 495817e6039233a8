"""The papers' numbers as data: results/paper/<name>.yaml, one file for each published table or figure."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from common.experiments.definitions import ROOT, Definition, load_definition
from common.experiments.table_file import PAPER

PAPERS = {
    "promise": "From Promise to Practice: Realizing High-performance Decentralized Training (ICLR 2025, "
    "arXiv 2410.11998)",
    "exponential": "Exponential Graph is Provably Efficient for Decentralized Deep Training (NeurIPS 2021, "
    "arXiv 2110.13363)",
    "related": "Related work",
}
PLUS_MINUS = re.compile(r"(?P<value>\S+) \+- (?P<two_sigma>\S+)")


def _read(written: Any) -> Any:
    """Return 27.79, "27.79 +- 0.16" or {value: null, reason: ...} as a mapping."""
    if isinstance(written, str):
        match = PLUS_MINUS.fullmatch(written)
        return match.groupdict() if match else {"value": written}
    return written if isinstance(written, dict) else {"value": written}


class Published(Definition):
    """One published number, or None and the reason why we do not know it."""

    value: float | None
    two_sigma: float | None = Field(None, description="as published, 2 sigma over runs")
    reason: str = ""

    @model_validator(mode="after")
    def _check(self) -> "Published":
        if (self.value is None) != bool(self.reason):
            raise ValueError("expected a number, or null and the reason why it is not known")
        return self


class PublishedQuantity(Definition):
    """A published quantity and its unit."""

    unit: str
    definition: str


class PublishedRow(Definition):
    """A row, bar or curve; our row next to it has the same name.

    beside: if several kinds of hardware share the row, or names differ: {our quantity: our rows} for its only number
    """

    name: str
    labels: dict[str, str | int]
    values: dict[str, Annotated[Published, BeforeValidator(_read)]]
    beside: dict[str, tuple[str, ...]] = Field({})

    @model_validator(mode="after")
    def _check(self) -> "PublishedRow":
        if self.beside and len(self.values) > 1:
            raise ValueError(f"row {self.name!r}: beside: expected in rows of one value")
        return self


def _is_file(name: str) -> str:
    if not (PAPER / name).is_file():
        raise ValueError(f"no such file in {PAPER.relative_to(ROOT)}")
    return name


class PublishedTable(Definition):
    """A published table or figure: its numbers and their source.

    curves: a CSV file next to it with the columns method, topology, epoch, time_ks and metrics
    axes:   {metric: the name of its axis}
    """

    paper: Literal["promise", "exponential", "related"]
    title: str
    source: str
    hardware: str
    runs: str = Field(description="how many runs are behind a number, and what its ± means")
    quantities: dict[str, PublishedQuantity]
    rows: tuple[PublishedRow, ...] = Field(min_length=1)
    curves: Annotated[str, AfterValidator(_is_file)] | None = None
    axes: dict[str, str] = Field({}, description="axis label of each metric of the curves")
    reference_bleu: float | None = Field(None, description="BLEU that the figure shows as a dashed line")

    @model_validator(mode="after")
    def _check(self) -> "PublishedTable":
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError(f"rows: expected each name once, got {', '.join(names)}")
        for row in self.rows:
            if row.values.keys() != self.quantities.keys():
                raise ValueError(f"row {row.name!r}: expected values of {', '.join(self.quantities)}")
        return self

    def frame(self) -> pd.DataFrame:
        """Return labels, quantities and their `_2sigma` (where any is published), line by line."""
        rows: list[dict[str, object]] = []
        for row in self.rows:
            values = {name: row.values[name].value for name in self.quantities}
            deviations = {f"{name}_2sigma": row.values[name].two_sigma for name in self.quantities}
            rows.append({**row.labels, **values, **deviations})
        frame = pd.DataFrame(rows, dtype=object)
        empty = [f"{name}_2sigma" for name in self.quantities if frame[f"{name}_2sigma"].isna().all()]
        return frame.drop(columns=empty)

    def read_curves(self) -> pd.DataFrame:
        """Read the digitised curves; raises ValueError if there are none."""
        if self.curves is None:
            raise ValueError(f"{self.title}: no curves are published")
        return pd.read_csv(PAPER / self.curves)


def load_published(name: str, folder: Path = PAPER) -> PublishedTable:
    """Read results/paper/<name>.yaml; raises UsageError naming file, key, value and expectation if that is wrong."""
    return load_definition(folder, name, PublishedTable, key="published")


@cache
def published_values(names: tuple[str, ...]) -> Mapping[str, Mapping[str, Published]]:
    """Return {row: {quantity: number}}, merged from several files."""
    values: dict[str, dict[str, Published]] = {}
    for name in names:
        for row in load_published(name).rows:
            values.setdefault(row.name, {}).update(row.values)
            for quantity, ours in row.beside.items():
                for one in ours:
                    values.setdefault(one, {})[quantity] = next(iter(row.values.values()))
    return values


def published_lines(names: Sequence[str]) -> list[str]:
    """Return lines on the sources of published numbers, and on which are unknown and why."""
    lines = []
    for name in names:
        published = load_published(name)
        lines.append(
            f"{published.title}. {PAPERS[published.paper]}. Read from: {published.source}. "
            f"Hardware: {published.hardware}. Runs: {published.runs}. Data: results/paper/{name}.yaml"
        )
        reasons: dict[str, list[str]] = {}
        for row in published.rows:
            for quantity, number in row.values.items():
                if number.value is None:
                    reasons.setdefault(number.reason, []).append(f"{row.name} {quantity}")
        lines += [f"Unknown: {', '.join(cells)}: {reason}" for reason, cells in reasons.items()]
    return lines
