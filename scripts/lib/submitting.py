"""Submit the missing runs of a table to Slurm, and a job that follows them; other commands decide which."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from common.cli import Arguments, Text, UsageError
from common.experiments.tables import Cell, Table
from scripts.lib.making import settled

DRY_RUN_TIMEOUT_S = 5.0  # for Slurm's answer, without which a dry run goes on


class LauncherArguments(Arguments):
    """Where and how a command makes the runs of a table."""

    table: Text = Field(description="a file in results/definitions/tables")
    runs: Text = Field("runs", description="the folder that holds the runs")
    jobs: PositiveInt = Field(1, description="number of runs at a time; they share the machine's cores")
    launcher: Literal["local", "slurm"] = Field("local", description="where to train: local | slurm")
    cluster: Text | None = Field(
        None, description="launcher=slurm: file of sbatch options, from slurm/clusters or yours (default: the table's)"
    )
    sbatch: Text | None = Field(None, description="launcher=slurm: further options for sbatch, in quotes")
    report_sbatch: Text | None = Field(
        None, description="launcher=slurm: options for the job after the runs, besides sbatch's account, partition etc."
    )
    dry_run: bool = Field(False, description="print the commands and the state of each run; run nothing")

    @classmethod
    def hint(cls, argv: Sequence[str]) -> str:
        """Return the hint that a table's values are set in its definition, not by arguments of this command."""
        table = next((word.partition("=")[2] for word in argv if word.startswith("table=")), "TABLE")
        return f"; a table's values are in its definition: copy results/definitions/tables/{table}.yaml"

    def check_launcher(self) -> None:
        """Raise UsageError for options of Slurm without launcher=slurm."""
        if self.launcher != "slurm" and (self.cluster or self.sbatch or self.report_sbatch):
            raise UsageError("cluster=..., sbatch=..., report_sbatch=...: only with launcher=slurm")


def submit_missing(
    arguments: LauncherArguments,
    table: Table,
    cells: Sequence[Cell],
    states: Sequence[str],
    follow_up: Sequence[str],
    purpose: str,
    known: int = 0,
) -> int:
    """Show every run's state and submit the runs that are neither settled nor with Slurm; return the exit code.

    follow_up: the job that follows the runs: a file of slurm/ and its arguments
    purpose:   what it does, as in "then: JOB, which ..."
    known:     how many must be settled or with Slurm; if fewer are, some failed, and nothing is submitted

    A dry run also works without Slurm: it then says that the queue could not be asked, and why.
    """
    from slurm.options import DEFAULT_CLUSTER, SbatchOptions
    from slurm.queue import ended, folder
    from slurm.submit import after, sized, submit

    default = SbatchOptions.load(arguments.cluster or table.cluster or DEFAULT_CLUSTER, arguments.sbatch)
    runs = Path(arguments.runs)
    queue = _queue_of(table, runs, arguments.dry_run)
    asked, queue = queue is not None, queue or {}
    todo = [
        cell
        for cell, state in zip(cells, states, strict=True)
        if state not in table.settled and cell.run_dir.resolve() not in queue
    ]
    groups = sized(table, todo, arguments.cluster, arguments.sbatch)
    options_of = {cell.run_dir: options for options, alike in groups.items() for cell in alike}
    for number, (cell, state) in enumerate(zip(cells, states, strict=True), start=1):
        last = ended(cell.run_dir) if asked and cell.run_dir in options_of else None
        state += f"; its last job: {last}" * bool(last)
        print(f"# [{number}/{len(cells)}] {cell.label}: {queue.get(cell.run_dir.resolve(), state)}")
        if arguments.dry_run and cell.run_dir in options_of:  # submitted as elements of arrays
            print(shlex.join(["sbatch", *options_of[cell.run_dir], "slurm/train.sbatch", cell.task, *cell.overrides]))
    for problem in missing_data([cell for cell in todo if cell.run_dir in options_of]):
        print(f"# warning: missing on this machine, but needed where the jobs run: {problem}")
    if todo and arguments.dry_run:
        sizes = ", ".join(str(len(alike)) for alike in groups.values())
        print(f"# each command trains one run; without --dry-run they are submitted as job arrays, of {sizes} runs")
    waiting = sum(cell.run_dir.resolve() in queue for cell in cells)
    print(f"# {settled(table, states)} of {len(cells)} finished, {waiting} with Slurm, {len(todo)} to submit")
    if len(cells) - len(todo) < known:
        print(f"error: {known - len(cells) + len(todo)} of these runs failed; see above", file=sys.stderr)
        return 1
    if todo and not arguments.dry_run:
        arrays = submit(table, groups, runs)
        print(f"submitted: {', '.join(arrays)}", flush=True)
        command = after(table, arrays, runs, default.for_report(arguments.report_sbatch), follow_up)
        code = _submit_follow_up(command, purpose)
        print(f"logs: {folder(table, runs)}/ARRAY_ELEMENT.log, numbered as squeue shows them, and RUN_DIR/slurm/")
        return code
    return 0


def _queue_of(table: Table, runs: Path, dry_run: bool) -> dict[Path, str] | None:
    """Return the table's runs that Slurm has; None if it did not answer a dry run, which goes on anyway."""
    from slurm.queue import TIMEOUT_S, submitted

    try:
        return submitted(table, runs, DRY_RUN_TIMEOUT_S if dry_run else TIMEOUT_S)
    except UsageError as error:
        if not dry_run:
            raise
        print(f"# cannot query the queue: {error}")
        return None


def _submit_follow_up(command: Sequence[str], purpose: str) -> int:
    """Submit the job that follows; if Slurm refuses it the arrays stay, and its command is shown."""
    from slurm.submit import sbatch

    try:
        print(f"then: {sbatch(*command)}, which {purpose}")
        return 0
    except UsageError as error:
        by_hand = f"submit the job that follows, with the options it needs:\n{shlex.join(['sbatch', *command])}"
        print(f"error: {error}\nthe runs stay submitted; {by_hand}", file=sys.stderr)
        return 1


def missing_data(cells: Sequence[Cell]) -> list[str]:
    """Return what these runs would not find if they were started here; compute nodes may see other folders."""
    from common.config.config import ConfigError
    from common.launch.compose import compose_config
    from common.training.task import load_task

    found = {}
    for cell in {(cell.task, cell.row.name, cell.variant): cell for cell in cells}.values():
        try:
            load_task(cell.task).check_files(compose_config(cell.task, list(cell.overrides)))
        except ConfigError as error:
            found[str(error)] = None
    return list(found)
