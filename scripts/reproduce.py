"""Train the runs that a table still needs, and score the test set if the table shows its scores.

python -m scripts.reproduce table=quickstart [rows=ROW,...] [seeds=1,2] [runs=runs] [jobs=1] [--dry-run]
python -m scripts.reproduce table=table3 launcher=slurm [rows=ROW,...] [seeds=1,2] [cluster=t4_4x8]
                         [sbatch="--time=12:00:00 ..."] [report_sbatch="--partition=cpu ..."] [--dry-run]

Where a table has variants, rows=ROW/VARIANT chooses one. Seeds may be any integers from 0 to 10^13; the table counts
only its own.
With launcher=slurm the runs are submitted (except for runs that are already queued or running), and after them a job
that builds table and figure; the command returns at once.

Exit codes: 0 all runs are finished; 1 some failed; 2 wrong arguments, or a run folder holds something else;
75 interrupted (start again to continue).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import Names, UsageError, command_of, main_function, nearest, parse
from common.config.base import LARGEST_SEED
from common.experiments.tables import Cell, Table, load_table
from scripts.lib.making import INTERRUPTED, make, print_plan, state_of
from scripts.lib.submitting import LauncherArguments, submit_missing

MODULE = "scripts.reproduce"


class ReproduceArguments(LauncherArguments):
    """Command line of scripts.reproduce."""

    rows: Names = Field((), description="rows to train, as in rows=a,b; ROW/VARIANT for one variant (default: all)")
    seeds: Names = Field((), description="integers, as in seeds=1,2 (default: the table's; it counts no others)")


@main_function
def main(argv: Sequence[str]) -> int:
    """Train or submit the missing runs of a table, or of a part of it."""
    arguments = parse(ReproduceArguments, argv, MODULE, "Train the runs that a table still needs.")
    table = _with_seeds(load_table(arguments.table), arguments.seeds)
    if table.untuned:
        raise UsageError(table.untuned)
    cells = _of_rows(list(table.cells(Path(arguments.runs))), arguments.rows)
    # All folders are checked before the first run, so that a wrong one does not come to light hours later.
    states = [state_of(table, cell) for cell in cells]
    if arguments.launcher == "slurm":
        report = ("slurm/report.sbatch", f"table={table.name}", f"runs={arguments.runs}")
        return submit_missing(arguments, table, cells, states, report, f"builds runs/report/{table.name}.*")
    arguments.check_launcher()
    if arguments.dry_run:
        print_plan(table, cells, states)
        return 0
    # Seed by seed and variant by variant, so that rows to be compared are made close in time, on a machine whose speed
    # may change, and have the same seeds after an interruption.
    variants = [*table.variants] or [None]
    place = [(table.seeds.index(cell.seed), variants.index(cell.variant)) for cell in cells]
    order = sorted(range(len(cells)), key=place.__getitem__)
    cells, states = [cells[index] for index in order], [states[index] for index in order]
    try:
        return make(table, cells, states, arguments.jobs)
    except KeyboardInterrupt:
        print(f"\ninterrupted; to continue: {command_of(MODULE, arguments)}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _with_seeds(table: Table, seeds: Sequence[str]) -> Table:
    """Return the table with these seeds, if any are given; raise UsageError unless they are integers in range."""
    if not seeds:
        return table
    try:
        chosen = tuple(dict.fromkeys(map(int, seeds)))
    except ValueError:
        raise UsageError(f"seeds={','.join(seeds)}: expected integers, as seeds=1,2") from None
    if wrong := [seed for seed in chosen if not 0 <= seed <= LARGEST_SEED]:
        raise UsageError(f"seeds={_listed(wrong)}: expected integers from 0 to {LARGEST_SEED}")
    if others := [seed for seed in chosen if seed not in table.seeds]:
        print(f"# seeds that the table does not count: {_listed(others)}; its own are {_listed(table.seeds)}")
    return table.model_copy(update={"seeds": chosen})


def _of_rows(cells: Sequence[Cell], rows: Sequence[str]) -> list[Cell]:
    """Return the cells of these rows, all if none are given; raise UsageError naming the first unknown row."""
    names = {cell: {cell.row.name, str(Path(cell.row.name, cell.variant or ""))} for cell in cells}
    known = set().union(*names.values())
    for row in rows:
        if row not in known:
            raise UsageError(f"rows={row}: unknown; {nearest(row, known)}")
    return [cell for cell in cells if not rows or names[cell] & set(rows)]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    sys.exit(main())
