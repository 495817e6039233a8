"""Tune the methods of a table, with equally many trials for each, and keep the chosen values.

python -m scripts.sweep table=table3_fair [runs=runs] [jobs=2] [--dry-run]
python -m scripts.sweep table=table3_fair power=true
python -m scripts.sweep table=NAME launcher=slurm [cluster=t4_4x8] [sbatch="--time=12:00:00 ..."]
                        [report_sbatch="--partition=cpu ..."] [--dry-run]

The table's `sweep` states the grid of rates, the seeds, and the quantity that is optimized. The grid grows, for all
methods alike, while one of them is best at an edge, at most as often as the sweep allows. Trials are ordinary runs in
RUNS/sweeps/TABLE, which the same command continues after an interruption. With launcher=slurm they are submitted, and
after them a job that runs this command again: it submits the next trials, or chooses.

At the end results/sweeps/TABLE.csv has all trials, TABLE.yaml the chosen values, which the table's rows take from then
on, TABLE.md both for readers, and TABLE.png a figure.

With power=true nothing is trained: the command says how many seeds the table's comparisons need, judging by the scatter
of the runs in RUNS and results/runs.

Exit codes: 0 the values are chosen, or trials submitted; 1 some failed (a diverged loss is no failure: it counts as the
worst); 2 wrong arguments, or a run folder holds something else; 75 interrupted (start again to continue).
"""

import shlex
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from pydantic import Field, NonNegativeInt

from common.cli import DEFAULT_RUNS, Text, UsageError, command_of, main_function, parse
from common.experiments.collect import collect
from common.experiments.runs import RunError
from common.experiments.tables import Table, load_table
from common.experiments.trials import Trials, first_grid, grown, methods_of, read_trials
from common.report.power import DEFINITIONS, power_frame
from common.report.sweep_files import LEFT, sweep_frame, write_sweep
from common.report.tables import format_texts, missing_summary
from scripts.lib.making import INTERRUPTED, make, print_plan, settled, state_of
from scripts.lib.submitting import LauncherArguments, submit_missing

MODULE = "scripts.sweep"


class SweepArguments(LauncherArguments):
    """Command line of scripts.sweep."""

    output: Text = Field("results/sweeps", description="folder for the trials and the chosen values")
    power: bool = Field(False, description="estimate how many seeds the table needs from finished runs; train nothing")
    submitted: NonNegativeInt = Field(
        0, description="launcher=slurm: trials that must have ended or be queued; the follow-up job sets it"
    )


@main_function
def main(argv: Sequence[str]) -> int:
    """Make or submit the trials that are missing; once all have ended, keep the best values."""
    arguments = parse(SweepArguments, argv, MODULE, "Tune a table's methods, with equally many trials for each.")
    arguments.check_launcher()
    table = load_table(arguments.table)
    if arguments.power:
        return _power(table, Path(arguments.runs))
    if table.sweep is None:
        raise UsageError(f"table={table.name}: has no sweep; expected a table whose definition has one")
    try:
        return _continue(arguments, table)
    except RunError as error:
        raise UsageError(f"{error}; remove this folder or choose another one by runs=...") from None
    except KeyboardInterrupt:
        print(f"\ninterrupted; to continue: {command_of(MODULE, arguments)}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _continue(arguments: SweepArguments, table: Table) -> int:
    """Make the trials of one grid after another until the grid need not grow, then write the results."""
    grid, before = first_grid(table.sweep), range(0)
    for extension in count():
        code = _make(arguments, table, grid, before)
        if code is not None:
            return code
        trials = read_trials(table, grid, Path(arguments.runs))
        methods = methods_of(table, grid, trials)
        edges = {method.edge for method in methods} - {None}
        if not edges or extension == table.sweep.extensions:
            break
        before, grid = grid, grown(grid, edges)
        print(f"# a method is best at the {' and the '.join(sorted(edges))} rate: the grid grows", flush=True)
    print(format_texts(sweep_frame(table, {method.name: method.tuned for method in methods}), LEFT))
    if arguments.dry_run:
        print("# all trials have ended: nothing is missing")
        return 0
    command = command_of(MODULE, arguments.model_copy(update={"submitted": 0}))
    print("written:", *write_sweep(table, trials, methods, Path(arguments.output), command))
    return 0


def _make(arguments: SweepArguments, table: Table, grid: range, before: range) -> int | None:
    """Make the trials at rates that the earlier grid lacked; return None once all have ended, else an exit code."""
    trials = Trials.of_table(table, [k for k in grid if k not in before])
    cells = list(trials.cells(Path(arguments.runs)))
    states = [state_of(trials, cell) for cell in cells]
    if settled(trials, states) == len(cells):
        return None
    methods, seeds = len(table.tuned_rows) * len(table.variants or [None]), len(trials.seeds)
    sizes = f"methods: {methods}, points: {len(grid)}, seeds: {seeds}"
    print(f"# {sizes}; extensions of the grid: at most {table.sweep.extensions}")
    if arguments.launcher == "slurm":
        earlier = methods * len(before) * seeds
        again = arguments.model_copy(update={"submitted": earlier + len(cells)})
        words = shlex.split(command_of(MODULE, again))[3:]
        follow_up, purpose = ("slurm/sweep.sbatch", *words), "submits the next trials, or chooses"
        return submit_missing(arguments, trials, cells, states, follow_up, purpose, arguments.submitted - earlier)
    if arguments.dry_run:
        print_plan(trials, cells, states)
        return 0
    return make(trials, cells, states, arguments.jobs) or None


def _power(table: Table, runs: Path) -> int:
    """Print how many seeds the table's comparisons need, and which missing runs that would take."""
    collection = collect(table, *dict.fromkeys([runs, *map(Path, DEFAULT_RUNS)]))
    frame = power_frame(collection)
    if frame.empty:
        raise UsageError(f"table={table.name}: compares no rows; expected columns <quantity>_difference or _equivalent")
    print(format_texts(frame, ("row", "other", "quantity")))
    for name, definition in DEFINITIONS.items():
        print(f"{name}: {definition}")
    for line in missing_summary(collection):
        print(f"run first: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
