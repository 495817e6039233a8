"""Makes a table from finished runs.

python -m scripts.tables table=quickstart [runs=runs] [output=results/tables]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.report.cli import Arguments, Text, command_of, main_function, parse
from common.report.collect import collect
from common.report.registry import load_table
from common.report.tables import build_table, format_table, missing_lines, write_table


class TablesArguments(Arguments):
    """Command line of scripts.tables."""

    table: Text = Field(description="a file in configs/table")
    runs: Text = Field("runs", description="the folder that holds the runs")
    output: Text = Field("results/tables", description="where NAME.csv and NAME.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Writes the table and prints it; exit code 2 if there is no run to make it from."""
    arguments = parse(TablesArguments, argv, "scripts.tables", "Makes a table from finished runs.")
    collection = collect(load_table(arguments.table), Path(arguments.runs))
    command = command_of("scripts.tables", arguments)
    csv, markdown = write_table(collection, Path(arguments.output), command)
    print(format_table(build_table(collection), "simple", collection.table.variants))
    for line in missing_lines(collection):
        print(f"missing: {line}")
    print(f"written: {csv} {markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
