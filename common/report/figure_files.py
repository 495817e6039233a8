"""Definitions of figures other than a table's curves: results/definitions/figures/<name>.yaml."""

from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import Field

from common.cli import UsageError, nearest
from common.report.definitions import ROOT, Definition, explained, names_in, read_definition

FIGURES = ROOT / "results" / "definitions" / "figures"


class _Figure(Definition):
    title: str
    table: str


class _RecordFigure(Definition):
    """A figure of a benchmark's record: a CSV file of results/benchmarks, and the command that writes it."""

    title: str
    records: str
    command: str

    def read(self, folder: Path) -> pd.DataFrame:
        """Return the record; UsageError if it has not been made."""
        if not (folder / self.records).exists():
            raise UsageError(f"{folder / self.records} is missing; make it with: {self.command}")
        return pd.read_csv(folder / self.records)


class Bars(_Figure):
    """A bar for each method: a value of a benchmark's table, for each cluster and number of workers."""

    kind: Literal["bars"]
    value: str
    axis: str


class Curves(_Figure):
    """Metrics against time: published curves above, those of some rows (and one variant) of a table below.

    metrics: {metric of the published curves: the metric of ours that is drawn below it}
    """

    kind: Literal["curves"]
    variant: str | None = None
    rows: tuple[str, ...] = Field(min_length=1)
    metrics: dict[str, str] = Field(min_length=1)
    published: str


class Rows(_Figure):
    """The learning curves of some rows of a table, as all its rows would be drawn."""

    kind: Literal["rows"]
    rows: tuple[str, ...] = Field(min_length=1)


class Panels(_Figure):
    """A metric against time, a panel for each variant of a table; its target, if it has one, is a line.

    panels: {variant: the panel's title}
    """

    kind: Literal["panels"]
    metric: str
    panels: dict[str, str] = Field(min_length=1)


class Lines(_RecordFigure):
    """Columns of a record against another one, both logarithmic.

    line:   a template of a line's label, filled with a row's columns
    values: {column: its axis}, a panel for each
    """

    kind: Literal["lines"]
    x: str
    line: str
    values: dict[str, str] = Field(min_length=1)


class Predictions(_RecordFigure):
    """Measured and predicted step times under several conditions."""

    kind: Literal["predictions"]


FigureFile = Bars | Curves | Rows | Panels | Lines | Predictions
KINDS = {"bars": Bars, "curves": Curves, "rows": Rows, "panels": Panels, "lines": Lines, "predictions": Predictions}


def load_figure(name: str, folder: Path = FIGURES) -> FigureFile:
    """Read a figure's file; raises UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="figure")
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{name}.yaml: kind={kind}: {nearest(str(kind), KINDS)}")
    with explained(folder, name, KINDS[kind]):
        return KINDS[kind].model_validate(content)


def figure_names(folder: Path = FIGURES) -> list[str]:
    """Return the figures that have a file; every table of runs can be drawn, too."""
    return names_in(folder)
