"""Pack the records of a table's finished runs into two files of results/runs, without checkpoints, for git.

python -m scripts.keep table=quickstart [runs=runs] [output=results/runs]

Runs that were kept earlier stay, except that a new run replaces the one of the same row, variant and seed.
common.experiments.runs says what is in the files.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import Arguments, Text, UsageError, main_function, parse
from common.experiments.collect import collect
from common.experiments.runs import write_pack
from common.experiments.tables import load_table


class KeepArguments(Arguments):
    """Command line of scripts.keep."""

    table: Text = Field(description="a file in results/definitions/tables")
    runs: Text = Field("runs", description="the folder that holds the runs")
    output: Text = Field("results/runs", description="folder for the records")


@main_function
def main(argv: Sequence[str]) -> int:
    """Pack the records of every usable run; exit code 2 if there is none."""
    arguments = parse(KeepArguments, argv, "scripts.keep", "Pack the records of finished runs.")
    if Path(arguments.output).resolve() == Path(arguments.runs).resolve():
        raise UsageError(f"output={arguments.output}: expected another folder than runs, which holds them already")
    collection = collect(load_table(arguments.table), Path(arguments.runs))
    folder = collection.table.runs
    runs = {run.folder.relative_to(collection.root / folder).as_posix(): run for run in collection.all_runs}
    write_pack(Path(arguments.output) / folder, runs)
    print(f"kept {len(collection.all_runs)} runs in {arguments.output}, {len(collection.missing)} missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
