"""Figures that are more than a table's curves: results/definitions/figures/<name>.yaml says what is drawn."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.cli import UsageError, nearest
from common.report.definitions import ROOT, Definition, explained, names_in, read_definition

FIGURES = ROOT / "results" / "definitions" / "figures"


class _Figure(Definition):
    title: str
    table: str


class Bars(_Figure):
    """A value of a benchmark's table for each cluster and number of workers, a bar for each method."""

    kind: Literal["bars"]
    value: str
    axis: str


class Curves(_Figure):
    """Metrics against time: published curves above, below those of some rows (and one variant) of a table."""

    kind: Literal["curves"]
    variant: str | None = None
    rows: tuple[str, ...] = Field(min_length=1)
    metrics: tuple[str, ...] = Field(min_length=1)
    published: str


KINDS = {"bars": Bars, "curves": Curves}


def load_figure(name: str, folder: Path = FIGURES) -> Bars | Curves:
    """Reads a figure's file; UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="figure")
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{name}.yaml: kind={kind}: {nearest(str(kind), KINDS)}")
    with explained(folder, name, KINDS[kind]):
        return KINDS[kind].model_validate(content)


def figure_names(folder: Path = FIGURES) -> list[str]:
    """The figures that have a file; every table of runs can be drawn besides."""
    return names_in(folder)
