"""Figures: those of tables, and those that results/definitions/figures/<name>.yaml defines."""

from collections.abc import Callable, Sequence
from collections.abc import Collection as Some
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.figure import Figure
from pydantic import Field, model_validator

from common.cli import UsageError, nearest
from common.experiments.collect import Collection
from common.experiments.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.benchmark_tables import build_benchmark, load_benchmark, missing_records
from common.report.curves import draw_below_published, draw_table
from common.report.lines import draw_bars, draw_over_setting
from common.report.style import FORMATS, save
from common.report.tables import missing_summary

FIGURES = ROOT / "results" / "definitions" / "figures"


class Drawing(NamedTuple):
    """A figure that can be drawn.

    draw:    returns the figure
    missing: a line for each run or record that it should show and does not
    """

    draw: Callable[[], Figure]
    missing: Sequence[str] = ()


CollectionOf = Callable[[str], Collection]  # returns a table's runs, by the table's name


class Bars(Definition):
    """A value of a benchmark's table: a panel for each cluster, published and ours, a bar for each method."""

    kind: Literal["bars"]
    title: str
    table: str
    value: str
    axis: str

    def drawing(self, _: CollectionOf, benchmarks: Path) -> Drawing:
        """Return the drawing of a benchmark's table."""
        table = load_benchmark(self.table)
        frame = build_benchmark(table, benchmarks).dropna(subset=[self.value])
        panel, heights = frame["source"] + ": " + frame["cluster"], frame[self.value].astype(float)
        workers = frame["workers"].astype(int).astype(str) + " workers"
        frame = frame.assign(panel=panel, group=workers, bar=frame["method"], height=heights)
        return Drawing(partial(draw_bars, frame, self.title, self.axis), missing_records(table, benchmarks))


class Curves(Definition):
    """Learning curves of a table's runs.

    rows:      some of its rows, as all would be drawn (default: all)
    variant:   of which variant
    published: a file of results/paper whose curves are drawn above ours
    metrics:   {metric of the published curves: the metric of ours that is drawn below it}
    """

    kind: Literal["curves"]
    title: str
    table: str
    rows: tuple[str, ...] = ()
    variant: str | None = None
    published: str | None = None
    metrics: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _check(self) -> "Curves":
        if bool(self.published) != bool(self.metrics):
            raise ValueError("expected published with metrics, and only with them")
        return self

    def drawing(self, collection_of: CollectionOf, _: Path) -> Drawing:
        """Return the drawing of the table's runs."""
        collection = collection_of(self.table)
        if self.variant is not None:
            collection = collection.of_variant(self.variant)
        rows = self.rows or [row.name for row in collection.table.rows]
        collection = collection.of_rows(rows, self.title)
        if self.published:
            draw = partial(draw_below_published, collection, self.published, self.metrics)
        else:
            draw = partial(draw_table, collection)
        return Drawing(draw, missing_summary(collection))


FigureFile = Bars | Curves
KINDS = {"bars": Bars, "curves": Curves}


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


def write_figures(collection: Collection, folder: Path, formats: Some[str] = FORMATS) -> list[Path]:
    """Write <folder>/<table>[_<variant>] in these formats for variants with runs; return the paths.

    A table over a setting is one picture with all its variants.
    """
    parts, draw = [collection], draw_over_setting
    if collection.table.setting is None:
        parts, draw = [collection.of_variant(name) for name in collection.table.variants] or parts, draw_table
    drawn = {part.table.name: partial(draw, part) for part in parts if part.all_runs}
    return [file for name, draw in drawn.items() for file in save(draw, folder, name, formats)]
