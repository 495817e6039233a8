"""Draws finished runs.

python -m scripts.figures figure=quickstart [runs=runs] [output=results/figures]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.report.cli import Arguments, Text, UsageError, main_function, parse
from common.report.collect import collect
from common.report.figures import write_figure
from common.report.registry import load_table
from common.report.runs import RunError
from common.report.tables import missing_lines


class FiguresArguments(Arguments):
    """Command line of scripts.figures."""

    figure: Text = Field(description="a file in configs/table")
    runs: Text = Field("runs", description="the folder that holds the runs")
    output: Text = Field("results/figures", description="where NAME.png and NAME.svg are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Writes the figure; exit code 2 if there is no run to draw."""
    arguments = parse(FiguresArguments, argv, "scripts.figures", "Draws finished runs.")
    collection = collect(load_table(arguments.figure, key="figure"), Path(arguments.runs))
    try:
        figures = [write_figure(each, Path(arguments.output)) for each in collection.by_variant()]
    except RunError as error:
        raise UsageError(str(error)) from None
    for line in missing_lines(collection):
        print(f"missing: {line}")
    print("written:", *(path for paths in figures for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
