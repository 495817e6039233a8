"""Copy the records of a table's finished runs to results/runs, without checkpoints, small enough for git.

python -m scripts.keep table=quickstart [runs=runs] [output=results/runs]
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import Arguments, Text, UsageError, main_function, parse
from common.experiments.collect import collect
from common.experiments.tables import load_table

RECORDS = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json")
OPTIONAL = ("evaluation/test.csv", "evaluation/test.json")  # of transformer.evaluate


class KeepArguments(Arguments):
    """Command line of scripts.keep."""

    table: Text = Field(description="a file in results/definitions/tables")
    runs: Text = Field("runs", description="the folder that holds the runs")
    output: Text = Field("results/runs", description="where the records go")


@main_function
def main(argv: Sequence[str]) -> int:
    """Copy the records of every usable run; exit code 2 if there is none."""
    arguments = parse(KeepArguments, argv, "scripts.keep", "Copy the records of finished runs.")
    if Path(arguments.output).resolve() == Path(arguments.runs).resolve():
        raise UsageError(f"output={arguments.output}: expected another folder than runs, which holds them already")
    collection = collect(load_table(arguments.table), Path(arguments.runs))
    for run in collection.all_runs:
        target = Path(arguments.output) / run.folder.relative_to(collection.root)
        target.mkdir(parents=True, exist_ok=True)
        for name in (*RECORDS, *OPTIONAL):
            if name in OPTIONAL and not (run.folder / name).exists():
                (target / name).unlink(missing_ok=True)  # of an earlier run
                continue
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(run.folder / name, target / name)
    print(f"kept {len(collection.all_runs)} runs in {arguments.output}, {len(collection.missing)} missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
