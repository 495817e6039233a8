"""Draw the papers' figures, figures of benchmark records, and the learning curves of any table.

python -m scripts.figures figure=7 [runs=[runs,results/runs]] [output=runs/report] [formats=[png,svg]] [rows=a,b]

figure=7 is figure7 of results/definitions/figures; figure=table3_fair draws that table's runs: with more than seven
rows, only the baseline and the best row of each method, or the rows that rows= names. The kept figures are written
with output=results/figures.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from common.cli import DEFAULT_RUNS, ONE_OR_SEVERAL, Arguments, Folders, Names, Text, UsageError, main_function, parse
from common.experiments.collect import collect
from common.experiments.definitions import names_in
from common.experiments.tables import full_name, load_table
from common.report.figures import FIGURES, load_figure, of_rows, write_figures
from common.report.style import FORMATS, save
from common.report.tables import missing_summary


class FiguresArguments(Arguments):
    """Command line of scripts.figures."""

    figure: Text = Field(description="a file of results/definitions/figures or /tables; 7 is figure7")
    runs: Folders = Field(DEFAULT_RUNS, description="the folder that holds the runs, or several: [a,b]")
    benchmarks: Text = Field("results/benchmarks", description="the folder that holds the benchmark records")
    output: Text = Field("runs/report", description="folder for NAME.png, ...")
    formats: Annotated[tuple[Literal["png", "svg", "pdf"], ...], ONE_OR_SEVERAL, Field(min_length=1)] = Field(
        FORMATS, description="png, svg, pdf, or several: [png,svg]"
    )
    rows: Names = Field((), description="rows of a table to draw, as in rows=a,b (default: at most seven)")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write the figure; exit code 2 if there is nothing to draw."""
    arguments = parse(FiguresArguments, argv, "scripts.figures", "Draw finished runs.")
    output, roots = Path(arguments.output), [Path(folder) for folder in arguments.runs]
    name = full_name(arguments.figure, "figure")
    if name not in names_in(FIGURES):
        collection = collect(load_table(arguments.figure, "figure", also=names_in(FIGURES)), *roots)
        if arguments.rows:
            collection = of_rows(collection, arguments.rows, collection.table.title)
        files = write_figures(collection, output, arguments.formats, every=bool(arguments.rows))
        missing = missing_summary(collection)
    elif arguments.rows:
        raise UsageError(f"rows={','.join(arguments.rows)}: expected with a table; {name}.yaml names the figure's rows")
    else:
        drawing = load_figure(name).drawing(
            lambda table: collect(load_table(table), *roots, allow_empty=True), Path(arguments.benchmarks)
        )
        files, missing = save(drawing.draw, output, name, arguments.formats), drawing.missing
    for line in missing:
        print(f"missing: {line}")
    print("written:", *files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
