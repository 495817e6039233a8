"""What each kind of figure in results/definitions/figures is drawn from, and by."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from common.report.bars import draw_bars
from common.report.benchmark_tables import build_benchmark, load_benchmark, missing_records
from common.report.collect import Collection
from common.report.figure_files import Bars, FigureFile, Lines, Panels, Predictions, Rows
from common.report.figures import draw
from common.report.record_figures import draw_record
from common.report.tables import missing_summary
from common.report.time_curves import draw_panels, draw_time_curves, of_figure


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
    if isinstance(figure, Bars):
        table = load_benchmark(figure.table)
        return Drawing(
            partial(draw_bars, figure, build_benchmark(table, benchmarks)), missing_records(table, benchmarks)
        )
    if isinstance(figure, Lines | Predictions):
        return Drawing(partial(draw_record, figure, figure.read(benchmarks)), [])
    collection = collection_of(figure.table)
    if isinstance(figure, Panels):
        return Drawing(partial(draw_panels, figure, collection), missing_summary(collection))
    if isinstance(figure, Rows):
        collection = collection.of_rows(figure.rows, figure.title)
        return Drawing(partial(draw, collection), missing_summary(collection))
    collection = of_figure(figure, collection)
    return Drawing(partial(draw_time_curves, figure, collection), missing_summary(collection))
