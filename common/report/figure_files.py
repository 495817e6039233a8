"""Definitions of figures other than a table's curves: results/definitions/figures/<name>.yaml."""

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


class Panels(_Figure):
    """A metric against time, a panel for each variant of a table; its target, if it has one, is a line.

    panels: {variant: the panel's title}
    """

    kind: Literal["panels"]
    metric: str
    panels: dict[str, str] = Field(min_length=1)


KINDS = {"bars": Bars, "curves": Curves, "panels": Panels}


def load_figure(name: str, folder: Path = FIGURES) -> Bars | Curves | Panels:
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
