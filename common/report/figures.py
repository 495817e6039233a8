"""Figures: those of tables, and those that results/definitions/figures/<name>.yaml defines."""

from collections.abc import Callable, Sequence
from collections.abc import Collection as Some
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from common.cli import UsageError, nearest
from common.experiments.collect import Collection
from common.experiments.definitions import ROOT, Definition, explained, names_in, read_definition
from common.planner.conditions import CONDITIONS
from common.report.benchmark_tables import build_benchmark, load_benchmark, missing_records
from common.report.curves import draw_below_published, draw_table, draw_variants
from common.report.lines import draw_bars, draw_over_setting, draw_record
from common.report.style import FORMATS, save
from common.report.tables import missing_summary

FIGURES = ROOT / "results" / "definitions" / "figures"


class Bars(Definition):
    """A value of a benchmark's table: a panel for each cluster, published and ours, a bar for each method."""

    kind: Literal["bars"]
    title: str
    table: str
    value: str
    axis: str


class Curves(Definition):
    """Learning curves of a table's runs.

    rows:      some of its rows, as all would be drawn (default: all)
    variant:   of which variant
    panels:    {variant: title}: `metric` against time, a panel for each of these variants
    published: a file of results/paper whose curves are drawn above ours
    metrics:   {metric of the published curves: the metric of ours that is drawn below it}
    """

    kind: Literal["curves"]
    title: str
    table: str
    rows: tuple[str, ...] = ()
    variant: str | None = None
    panels: dict[str, str] = Field({})
    metric: str | None = None
    published: str | None = None
    metrics: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _check(self) -> "Curves":
        if bool(self.panels) != bool(self.metric) or bool(self.published) != bool(self.metrics):
            raise ValueError("expected panels with a metric, and published with metrics")
        return self


class Lines(Definition):
    """Columns of a benchmark's record against another one, both logarithmic.

    records, command: a CSV file of results/benchmarks, and what writes it
    line:             a template of a line's label, filled with a row's columns
    values:           {column: its axis}, a panel for each
    """

    kind: Literal["lines"]
    title: str
    records: str
    command: str
    x: str
    line: str
    values: dict[str, str] = Field(min_length=1)


class Predictions(Definition):
    """Measured and predicted step times under several conditions."""

    kind: Literal["predictions"]
    title: str
    records: str
    command: str


FigureFile = Bars | Curves | Lines | Predictions
KINDS = {"bars": Bars, "curves": Curves, "lines": Lines, "predictions": Predictions}


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
    table = collection.table
    if table.setting is not None:
        drawn = {table.name: partial(draw_over_setting, collection)} if collection.all_runs else {}
    else:
        drawn = {each.table.name: partial(draw_table, each) for each in collection.by_variant() if each.all_runs}
    return [file for name, draw in drawn.items() for file in save(draw, folder, name, formats)]


class Drawing(NamedTuple):
    """A figure that can be drawn.

    draw:    returns the figure
    missing: a line for each run or record that it should show and does not
    """

    draw: Callable[[], Figure]
    missing: Sequence[str]


def drawing_of(figure: FigureFile, collection_of: Callable[[str], Collection], benchmarks: Path) -> Drawing:
    """Return the drawing of a figure's file.

    collection_of: returns a table's runs, by the table's name
    benchmarks:    the folder of the benchmarks' records
    Raises UsageError if the record that is all of a figure has not been made.
    """
    missing: Sequence[str] = []
    if isinstance(figure, Curves):
        collection = collection_of(figure.table)
        if figure.variant is not None:
            collection = dict(zip(collection.table.variants, collection.by_variant(), strict=True))[figure.variant]
        rows = figure.rows or [row.name for row in collection.table.rows]
        collection = collection.of_rows(rows, figure.title)
        missing = missing_summary(collection)
        if figure.published:
            draw = partial(draw_below_published, collection, figure.published, figure.metrics)
        elif figure.panels:
            draw = partial(draw_variants, collection, figure.title, figure.metric, figure.panels)
        else:
            draw = partial(draw_table, collection)
        return Drawing(draw, missing)
    if isinstance(figure, Bars):
        table = load_benchmark(figure.table)
        frame, missing = _methods(build_benchmark(table, benchmarks), figure.value), missing_records(table, benchmarks)
        draw = partial(draw_bars, frame, figure.axis, columns=3)
    else:
        if not (benchmarks / figure.records).exists():
            raise UsageError(f"{benchmarks / figure.records} is missing; make it with: {figure.command}")
        frame = pd.read_csv(benchmarks / figure.records)
        if isinstance(figure, Lines):
            draw = partial(draw_record, frame, figure.x, figure.line, figure.values)
        else:
            draw = partial(draw_bars, _conditions(frame), "ms per step", columns=1, mark="predicted")
    return Drawing(partial(_titled, draw, figure.title), missing)


def _titled(draw: Callable[[], Figure], title: str) -> Figure:
    figure = draw()
    figure.suptitle(title)
    return figure


def _methods(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return a benchmark's table as `draw_bars` takes it."""
    frame = frame.dropna(subset=[value])
    panel, workers = frame["source"] + ": " + frame["cluster"], frame["workers"].astype(int).astype(str) + " workers"
    return frame.assign(panel=panel, group=workers, bar=frame["method"], height=frame[value].astype(float))


def _conditions(frame: pd.DataFrame) -> pd.DataFrame:
    """Return measured and predicted step times as `draw_bars` takes them, conditions in their usual order."""
    case = "{model} on {hosts} hosts x {ranks_per_host}, {mbit_per_s:g} Mbit/s, {compute_ms:g} ms of computing"
    method = (frame["engine"] + "\n" + frame["topology"].str.replace("/", "/\n", n=1)).str.replace("_", " ")
    labels = {name: f"measured, {condition.label}" for name, condition in CONDITIONS.items()}
    panel, bar = [case.format(**row) for row in frame.to_dict("records")], frame["condition"].map(labels)
    bar = bar.astype(pd.CategoricalDtype(labels.values(), ordered=True))
    frame = frame.rename(columns={"measured_ms": "height", "predicted_ms": "predicted"})
    return frame.assign(panel=panel, group=method, bar=bar).sort_values("bar", kind="stable")
