"""Draw the papers' figures, those of benchmarks' records, and the learning curves of any table.

python -m scripts.figures figure=7 [runs=[runs,results/runs]] [output=runs/report]

figure=7 is figure7 of results/definitions/figures; figure=table3_fair draws that table's runs. The kept
figures are written with output=results/figures.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import DEFAULT_RUNS, Arguments, Folders, Text, main_function, parse
from common.report.collect import collect
from common.report.drawing import save
from common.report.figure_drawings import drawing_of
from common.report.figure_files import figure_names, load_figure
from common.report.figures import write_figures
from common.report.registry import full_name, load_table
from common.report.tables import missing_summary


class FiguresArguments(Arguments):
    """Command line of scripts.figures."""

    figure: Text = Field(description="a file of results/definitions/figures or /tables; 7 is figure7")
    runs: Folders = Field(DEFAULT_RUNS, description="the folder that holds the runs, or several: [a,b]")
    benchmarks: Text = Field("results/benchmarks", description="the folder that holds the benchmarks' records")
    output: Text = Field("runs/report", description="where NAME.png and NAME.svg are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write the figure; exit code 2 if there is nothing to draw."""
    arguments = parse(FiguresArguments, argv, "scripts.figures", "Draw finished runs.")
    output, roots = Path(arguments.output), [Path(folder) for folder in arguments.runs]
    name = full_name(arguments.figure, "figure")
    if name not in figure_names():
        collection = collect(load_table(arguments.figure, "figure", also=figure_names()), *roots)
        files, missing = write_figures(collection, output), missing_summary(collection)
    else:
        drawing = drawing_of(
            load_figure(name),
            lambda table: collect(load_table(table), *roots, allow_empty=True),
            Path(arguments.benchmarks),
        )
        files, missing = save(drawing.draw, output, name), drawing.missing
    for line in missing:
        print(f"missing: {line}")
    print("written:", *files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
