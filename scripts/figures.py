"""Draw the papers' figures, those of benchmarks' records, and the learning curves of any table.

python -m scripts.figures figure=7 [runs=[runs,results/runs]] [output=results/figures]

figure=7 is figure7 of results/definitions/figures; figure=table3_fair draws that table's runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import DEFAULT_RUNS, Arguments, Folders, Text, main_function, parse
from common.report.bars import draw_bars
from common.report.benchmark_tables import build_benchmark, load_benchmark, missing_records
from common.report.collect import collect
from common.report.drawing import save
from common.report.figure_files import Bars, Lines, Panels, Predictions, Rows, figure_names, load_figure
from common.report.figures import draw, write_figures
from common.report.record_figures import draw_record
from common.report.registry import full_name, load_table
from common.report.tables import missing_lines
from common.report.time_curves import draw_panels, draw_time_curves, of_figure


class FiguresArguments(Arguments):
    """Command line of scripts.figures."""

    figure: Text = Field(description="a file of results/definitions/figures or /tables; 7 is figure7")
    runs: Folders = Field(DEFAULT_RUNS, description="the folder that holds the runs, or several: [a,b]")
    benchmarks: Text = Field("results/benchmarks", description="the folder that holds the benchmarks' records")
    output: Text = Field("results/figures", description="where NAME.png and NAME.svg are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write the figure; exit code 2 if there is nothing to draw."""
    arguments = parse(FiguresArguments, argv, "scripts.figures", "Draw finished runs.")
    output, roots = Path(arguments.output), [Path(folder) for folder in arguments.runs]
    name = full_name(arguments.figure, "figure")
    if name not in figure_names():
        collection = collect(load_table(arguments.figure, "figure", also=figure_names()), *roots)
        files, missing = write_figures(collection, output), missing_lines(collection)
    else:
        files, missing = write_registered(name, roots, Path(arguments.benchmarks), output)
    for line in missing:
        print(f"missing: {line}")
    print("written:", *files)
    return 0


def write_registered(name: str, roots: Sequence[Path], benchmarks: Path, output: Path) -> tuple[list[Path], list[str]]:
    """Draw a figure of results/definitions/figures; return the files written and lines on what is missing."""
    figure = load_figure(name)
    if isinstance(figure, Bars):
        table = load_benchmark(figure.table)
        frame = build_benchmark(table, benchmarks)
        return save(lambda: draw_bars(figure, frame), output, name), missing_records(table, benchmarks)
    if isinstance(figure, Lines | Predictions):
        record = figure.read(benchmarks)
        return save(lambda: draw_record(figure, record), output, name), []
    collection = collect(load_table(figure.table), *roots, allow_empty=True)
    if isinstance(figure, Panels):
        return save(lambda: draw_panels(figure, collection), output, name), missing_lines(collection)
    if isinstance(figure, Rows):
        collection = collection.of_rows(figure.rows, figure.title)
        return save(lambda: draw(collection), output, name), missing_lines(collection)
    collection = of_figure(figure, collection)
    return save(lambda: draw_time_curves(figure, collection), output, name), missing_lines(collection)


if __name__ == "__main__":
    sys.exit(main())
