"""Score the test set with the last models of a table's runs, where the table shows scores that a run lacks.

python -m scripts.score table=table2 [runs=runs] [models=all]

scripts.reproduce does this after training, slurm/report.sbatch before it makes the table. models=all scores every model
that the runs kept, for Figure 7's curves.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from common.cli import Arguments, Text, main_function, parse
from common.experiments.collect import collect, score_arguments
from common.experiments.tables import Table, load_table


class ScoreArguments(Arguments):
    """Command line of scripts.score."""

    table: Text = Field(description="a file in results/definitions/tables")
    runs: Text = Field("runs", description="the folder that holds the runs")
    models: Literal["last", "all"] = Field("last", description="score the last model, or all kept models, for curves")


@main_function
def main(argv: Sequence[str]) -> int:
    """Score every finished run without scores; exit code 1 if some failed, 2 if there is no run."""
    arguments = parse(ScoreArguments, argv, "scripts.score", "Score finished runs on the test set.")
    table = load_table(arguments.table)
    runs = collect(table, Path(arguments.runs)).all_runs
    return 1 if score(table, [run.folder for run in runs], arguments.models) else 0


def score(table: Table, runs: Sequence[Path], models: Literal["last", "all"] = "last") -> list[Path]:
    """Score the runs that lack scores, one after another; return the runs for which that failed."""
    failed = []
    for run in runs:
        call = score_arguments(table, run, models)
        if call:
            print(f"{run}: scoring the test set", flush=True)
            if subprocess.run([sys.executable, *call], check=False).returncode:
                failed.append(run)
    return failed


if __name__ == "__main__":
    sys.exit(main())
