"""Trains the runs that a table still needs, and scores the test set where the table shows that.

python -m scripts.reproduce table=quickstart [rows=ROW,...] [seeds=1,2] [runs=runs] [jobs=1] [--dry-run]
python -m scripts.reproduce table=table3 launcher=slurm [rows=ROW,...] [seeds=1,2] [cluster=t4_4x8]
                         [sbatch="--time=12:00:00 ..."] [report_sbatch="--partition=cpu ..."] [--dry-run]

Where a table has variants, rows=ROW/VARIANT chooses one. Seeds may be any integers; the table counts only its own.
With launcher=slurm the runs are submitted (those that wait or run already are left alone), and after them a job that
builds table and figure; the command returns at once.

Exit codes: 0 all runs are finished; 1 some failed; 2 wrong arguments, or a run folder holds something else;
75 interrupted (start again to continue).
"""

import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from common.cli import Arguments, Text, UsageError, command_of, main_function, nearest, parse
from common.report.collect import check_overrides, read_cell, score_arguments
from common.report.columns import QUANTITIES
from common.report.registry import Cell, Table, load_table
from common.report.runs import RunError, read_json
from scripts.score import score

INTERRUPTED = 75
MODULE = "scripts.reproduce"
DRY_RUN_TIMEOUT_S = 5.0  # of Slurm's answer: commands do not wait for it
# One name or several: rows=a, rows=a,b, rows=[a,b].
Names = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v if isinstance(v, list | tuple) else [v]),
    Field(min_length=1),
]


class ReproduceArguments(Arguments):
    """Command line of scripts.reproduce."""

    table: Text = Field(description="a file in results/definitions/tables")
    rows: Names = Field((), description="some of its rows, as rows=a,b; ROW/VARIANT for one variant (default: all)")
    seeds: Names = Field((), description="integers, as seeds=1,2; the table counts only its own (default: those)")
    runs: Text = Field("runs", description="the folder that holds the runs")
    jobs: PositiveInt = Field(1, description="runs at a time, which share the machine's cores")
    launcher: Literal["local", "slurm"] = Field("local", description="where runs are made: local | slurm")
    cluster: Text | None = Field(
        None, description="launcher=slurm: options of sbatch, a file of slurm/clusters or yours (default: the table's)"
    )
    sbatch: Text | None = Field(None, description="launcher=slurm: further options of sbatch, in quotes")
    report_sbatch: Text | None = Field(
        None, description="launcher=slurm: options of the job that builds the table, besides sbatch's account and such"
    )
    dry_run: bool = Field(False, description="print the commands and what is missing, run nothing")


@main_function
def main(argv: Sequence[str]) -> int:
    """Train or submit the missing runs of a table, or of a part of it."""
    arguments = parse(ReproduceArguments, argv, MODULE, "Trains the runs that a table still needs.")
    table = _with_seeds(load_table(arguments.table), arguments.seeds)
    cells = _of_rows(list(table.cells(Path(arguments.runs))), arguments.rows)
    # All folders are checked before the first run, so that a wrong one does not come to light hours later.
    states = [_state(table, cell) for cell in cells]
    if arguments.launcher == "slurm":
        return _submit(arguments, table, cells, states)
    if arguments.cluster or arguments.sbatch or arguments.report_sbatch:
        raise UsageError("cluster=..., sbatch=..., report_sbatch=...: only with launcher=slurm")
    if arguments.dry_run:
        _print_plan(table, cells, states)
        return 0
    try:
        return _make(table, cells, states, arguments.jobs)
    except KeyboardInterrupt:
        print(f"\ninterrupted; to continue: {command_of(MODULE, arguments)}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _with_seeds(table: Table, seeds: Sequence[str]) -> Table:
    """Return the table with these seeds, if any are given; raise UsageError for one that is no integer."""
    if not seeds:
        return table
    try:
        chosen = tuple(dict.fromkeys(map(int, seeds)))
    except ValueError:
        raise UsageError(f"seeds={','.join(seeds)}: expected integers, as seeds=1,2") from None
    if others := [seed for seed in chosen if seed not in table.seeds]:
        print(f"# seeds that the table does not count: {_listed(others)}; its own are {_listed(table.seeds)}")
    return table.model_copy(update={"seeds": chosen})


def _of_rows(cells: Sequence[Cell], rows: Sequence[str]) -> list[Cell]:
    """Return the cells of these rows, all if none are given; UsageError naming the first that is unknown."""
    names = {cell: {cell.row.name, str(Path(cell.row.name, cell.variant or ""))} for cell in cells}
    known = set().union(*names.values())
    for row in rows:
        if row not in known:
            raise UsageError(f"rows={row}: unknown; {nearest(row, known)}")
    return [cell for cell in cells if not rows or names[cell] & set(rows)]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _state(table: Table, cell: Cell) -> str:
    """Return what the cell's folder holds: "missing", "finished" or how far it came.

    Raises UsageError if it holds another run or a broken one: nothing is overwritten or counted by mistake.
    """
    summary = cell.run_dir / "summary.json"
    environment = cell.run_dir / "environment.json"
    if not summary.exists() and not environment.exists():
        return "missing"
    try:
        check_overrides(cell, read_json(environment))
        status = str(read_json(summary).get("status")) if summary.exists() else "unfinished"
        if status == "finished":
            read_cell(table, cell)
    except RunError as error:
        raise UsageError(f"{error}; remove this folder or choose another one by runs=...") from None
    return status


def _resume(cell: Cell) -> list[str]:
    """Return the override that continues the run in the cell's folder; none if there is no run."""
    return ["resume=true"] if cell.run_dir.is_dir() and any(cell.run_dir.iterdir()) else []


def _command(cell: Cell) -> str:
    return " ".join([cell.command, *_resume(cell)])


def _print_plan(table: Table, cells: Sequence[Cell], states: Sequence[str]) -> None:
    """Print the commands of the runs to make; all else is a comment, so that a shell takes the whole output."""
    for number, (cell, state) in enumerate(zip(cells, states, strict=True), start=1):
        print(f"# [{number}/{len(cells)}] {cell.label}: {state}")
        if state != "finished":
            print(_command(cell))
        if scoring := score_arguments(table, cell.run_dir):
            print(shlex.join(["python", *scoring]))
    print(f"# {states.count('finished')} of {len(cells)} finished")


def _submit(arguments: ReproduceArguments, table: Table, cells: Sequence[Cell], states: Sequence[str]) -> int:
    """Show the state of every run and submit those that are neither finished nor in Slurm's hands; the exit code.

    A dry run also goes without Slurm: then it says that the queue could not be asked, and why.
    """
    from slurm.options import DEFAULT_CLUSTER, SbatchOptions
    from slurm.queue import TIMEOUT_S, ended, submitted
    from slurm.submit import sized, submit

    default = SbatchOptions.load(arguments.cluster or table.cluster or DEFAULT_CLUSTER, arguments.sbatch)
    runs, asked = Path(arguments.runs), True
    try:
        queue = submitted(table, runs, DRY_RUN_TIMEOUT_S if arguments.dry_run else TIMEOUT_S)
    except UsageError as error:
        if not arguments.dry_run:
            raise
        queue, asked = {}, False
        print(f"# the queue could not be asked: {error}")
    todo = [
        cell for cell, state in zip(cells, states, strict=True) if state != "finished" and cell.run_dir not in queue
    ]
    groups = sized(table, todo, arguments.cluster, arguments.sbatch)
    options_of = {cell.run_dir: options for options, alike in groups.items() for cell in alike}
    for number, (cell, state) in enumerate(zip(cells, states, strict=True), start=1):
        last = ended(cell.run_dir) if asked and cell.run_dir in options_of else None
        state += f"; its last job: {last}" * bool(last)
        print(f"# [{number}/{len(cells)}] {cell.label}: {queue.get(cell.run_dir, state)}")
        if arguments.dry_run and cell.run_dir in options_of:  # what is submitted are arrays of these
            print(shlex.join(["sbatch", *options_of[cell.run_dir], "slurm/train.sbatch", cell.task, *cell.overrides]))
    waiting = sum(cell.run_dir in queue for cell in cells)
    print(f"# {states.count('finished')} of {len(cells)} finished, {waiting} with Slurm, {len(todo)} to submit")
    if todo and not arguments.dry_run:
        arrays = submit(table, groups, runs)
        print(f"submitted: {', '.join(arrays)}", flush=True)
        return _submit_report(table, arrays, runs, default.for_report(arguments.report_sbatch))
    return 0


def _submit_report(table: Table, arrays: Sequence[str], runs: Path, options: Sequence[str]) -> int:
    """Submit the job that builds table and figure; if Slurm refuses it the arrays stay, and its command is shown."""
    from slurm.submit import report_command, sbatch

    command = report_command(table, arrays, runs, options)
    try:
        report = sbatch(*command)
    except UsageError as error:
        by_hand = shlex.join(["sbatch", *command])
        print(
            f"error: {error}\nthe runs stay submitted; their table, with the options it needs:\n{by_hand}",
            file=sys.stderr,
        )
        return 1
    print(f"then: {report}, which builds results/tables/{table.name}.*")
    return 0


def _make(table: Table, cells: Sequence[Cell], states: Sequence[str], jobs: int) -> int:
    """Make every run that is not finished, one progress line each; return the exit code, 1 if some failed."""
    width = max(len(cell.label) for cell in cells)
    heads = {
        cell: f"[{number:{len(str(len(cells)))}}/{len(cells)}] {cell.label:{width}} "
        for number, cell in enumerate(cells, start=1)
    }
    open_cells = [cell for cell, state in zip(cells, states, strict=True) if state != "finished"]
    for cell in cells:
        if cell not in open_cells:
            print(f"{heads[cell]} {_result(table, cell)}  finished before", flush=True)
    failures: list[tuple[Cell, str]] = []
    started = time.monotonic()
    for done, (cell, failure, duration) in enumerate(_train_all(table, open_cells, jobs), start=1):
        if failure:
            failures.append((cell, failure))
        left = (len(open_cells) - done) * (time.monotonic() - started) / done
        outcome = f"FAILED: {failure}" if failure else _result(table, cell)
        print(f"{heads[cell]} {outcome}  {duration:.1f} s  {timedelta(seconds=round(left))} left", flush=True)
    for cell, failure in failures:
        print(f"failed: {cell.label}: {failure}; to repeat: {_command(cell)}", file=sys.stderr)
    print(f"{len(cells) - len(failures)} of {len(cells)} runs finished")
    unscored = score(table, [cell.run_dir for cell in cells if cell not in dict(failures)])
    for run in unscored:
        print(f"failed: {run}: scoring the test set", file=sys.stderr)
    return 1 if failures or unscored else 0


def _train_all(table: Table, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, str | None, float]]:
    """Make these runs, `jobs` at a time; yield each with why it failed and its seconds, as they end."""
    if jobs == 1:
        for cell in cells:
            yield _timed(table, cell)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // jobs)
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs) as pool:  # at its end it waits for the runs that are being made
        try:
            futures = [pool.submit(_timed_beside_others, table, cell, threads, running) for cell in cells]
            for future in as_completed(futures):
                yield future.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()  # it saves a checkpoint and stops
            raise
        finally:
            signal.signal(signal.SIGTERM, former)


def _timed(table: Table, cell: Cell) -> tuple[Cell, str | None, float]:
    started = time.monotonic()
    failure = _train(table, cell)
    return cell, failure, time.monotonic() - started


def _timed_beside_others(
    table: Table, cell: Cell, threads: int, running: set[subprocess.Popen[bytes]]
) -> tuple[Cell, str | None, float]:
    """Do as _timed in a process that is in `running` as long as it runs."""
    started = time.monotonic()
    quiet = [f"training.threads={threads}", "logging.progress=false"]
    process = subprocess.Popen([sys.executable, "-m", f"{cell.task}.train", *cell.overrides, *quiet, *_resume(cell)])
    running.add(process)
    code = process.wait()
    running.discard(process)
    return cell, _judge(table, cell, code), time.monotonic() - started


def _train(table: Table, cell: Cell) -> str | None:
    """Make one run and return why it failed, None if it finished; KeyboardInterrupt if it was interrupted."""
    # Imported here: it brings torch, which neither --dry-run nor a finished table needs.
    from common.training.launch import launch

    try:
        code = launch(cell.task, [*cell.overrides, "logging.progress=false", *_resume(cell)])
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return _judge(table, cell, code)


def _judge(table: Table, cell: Cell, code: int | str | None) -> str | None:
    """Return what a run's exit code and folder mean, as _train does."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        return f"exit code {code}"
    try:
        read_cell(table, cell)
    except RunError as error:
        return str(error)
    return None


def _result(table: Table, cell: Cell) -> str:
    quantity = QUANTITIES[table.metric]
    return f"{table.metric} {quantity.of(read_cell(table, cell)):{quantity.style}}"


if __name__ == "__main__":
    sys.exit(main())
