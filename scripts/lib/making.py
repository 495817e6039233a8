"""Make the missing runs of a table on this machine; other commands decide which."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial

from common.cli import UsageError
from common.experiments.collect import LackingError, check_overrides, read_cell, score_arguments
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, has_run, read_json, read_status
from common.experiments.tables import Cell, Table
from scripts.score import score

INTERRUPTED = 75


def state_of(table: Table, cell: Cell) -> str:
    """Return the state of the cell's run: "missing", "unfinished", or the status in its summary.json.

    Raises UsageError if it holds another run or a broken one: nothing is overwritten or counted by mistake.
    """
    summary = cell.run_dir / "summary.json"
    environment = cell.run_dir / "environment.json"
    try:
        if not has_run(cell.run_dir):
            return "missing"
        if not cell.run_dir.is_dir():  # it is kept without a folder
            read_cell(table, cell)
            return "finished"
        if not summary.exists() and not environment.exists():
            return "missing"
        check_overrides(cell, read_json(environment))
        status = read_status(cell.run_dir) if summary.exists() else "unfinished"
        if status == "finished":
            read_cell(table, cell)
    except LackingError as error:
        raise UsageError(str(error)) from None
    except RunError as error:
        raise UsageError(f"{error}; remove this folder or choose another one by runs=...") from None
    return status


def print_plan(table: Table, cells: Sequence[Cell], states: Sequence[str]) -> None:
    """Print the commands of the runs to make; all else is a comment, so that a shell accepts the whole output."""
    for number, (cell, state) in enumerate(zip(cells, states, strict=True), start=1):
        print(f"# [{number}/{len(cells)}] {cell.label}: {state}")
        if state not in table.settled:
            print(cell.command_here)
        if scoring := score_arguments(table, cell.run_dir):
            print(shlex.join(["python", *scoring]))
    print(f"# {settled(table, states)} of {len(cells)} finished")


def settled(table: Table, states: Sequence[str]) -> int:
    """Return how many of these states need no more training."""
    return sum(state in table.settled for state in states)


def make(table: Table, cells: Sequence[Cell], states: Sequence[str], jobs: int) -> int:
    """Make every run that is not settled, one progress line each; return the exit code, 1 if some failed."""
    width = max(len(cell.label) for cell in cells)
    heads = {
        cell: f"[{number:{len(str(len(cells)))}}/{len(cells)}] {cell.label:{width}} "
        for number, cell in enumerate(cells, start=1)
    }
    open_cells = [cell for cell, state in zip(cells, states, strict=True) if state not in table.settled]
    for cell in cells:
        if cell not in open_cells:
            print(f"{heads[cell]} {_result(table, cell)}  already finished", flush=True)
    failures: list[tuple[Cell, str]] = []
    started = time.monotonic()
    for done, (cell, failure, duration) in enumerate(_train_all(table, open_cells, jobs), start=1):
        if failure:
            failures.append((cell, failure))
        left = (len(open_cells) - done) * (time.monotonic() - started) / done
        outcome = f"FAILED: {failure}" if failure else _result(table, cell)
        print(f"{heads[cell]} {outcome}  {duration:.1f} s  {timedelta(seconds=round(left))} left", flush=True)
    for cell, failure in failures:
        print(f"failed: {cell.label}: {failure}; to repeat: {cell.command_here}", file=sys.stderr)
    print(f"{len(cells) - len(failures)} of {len(cells)} runs finished")
    unscored = score(table, [cell.run_dir for cell in cells if cell not in dict(failures)])
    for run in unscored:
        print(f"failed: {run}: scoring the test set", file=sys.stderr)
    return 1 if failures or unscored else 0


def _train_all(table: Table, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, str | None, float]]:
    """Make these runs, `jobs` at a time; as each ends, yield it with why it failed and its seconds."""
    if jobs == 1:
        yield from (_timed(partial(_train, table), cell) for cell in cells)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // jobs)
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: set[subprocess.Popen[bytes]] = set()
    stopped = threading.Event()  # no run starts any more
    with ThreadPoolExecutor(jobs) as pool:  # at its end it waits for the runs that are being made
        try:
            train = partial(_train_beside_others, table, threads, running, stopped)
            futures = [pool.submit(_timed, train, cell) for cell in cells]
            for future in as_completed(futures):
                yield future.result()
        except KeyboardInterrupt:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()  # it saves a checkpoint and stops
            raise
        finally:
            signal.signal(signal.SIGTERM, former)


def _timed(train: Callable[[Cell], str | None], cell: Cell) -> tuple[Cell, str | None, float]:
    started = time.monotonic()
    failure = train(cell)
    return cell, failure, time.monotonic() - started


def _train_beside_others(
    table: Table, threads: int, running: set[subprocess.Popen[bytes]], stopped: threading.Event, cell: Cell
) -> str | None:
    """Do what _train does, in a process that is in `running` while it runs; not at all once it has `stopped`."""
    if stopped.is_set():
        raise KeyboardInterrupt
    quiet = [f"training.threads={threads}", "logging.progress=false"]
    process = subprocess.Popen([sys.executable, *cell.arguments(*quiet, *cell.resume)])
    running.add(process)
    if stopped.is_set():  # since, perhaps too late to be ended with the others
        process.terminate()
    code = process.wait()
    running.discard(process)
    if code == INTERRUPTED:
        stopped.set()
    return _judge(table, cell, code)


def _train(table: Table, cell: Cell) -> str | None:
    """Make one run and return why it failed, None if it finished; raise KeyboardInterrupt if it was interrupted."""
    # Imported here: it brings torch, which neither --dry-run nor a finished table needs.
    from common.launch.processes import launch

    try:
        code = launch(cell.task, [*cell.overrides, "logging.progress=false", *cell.resume])
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return _judge(table, cell, code)


def _judge(table: Table, cell: Cell, code: int | str | None) -> str | None:
    """Return why a run failed, judging by its exit code and folder, as _train does."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if _diverged(table, cell):
        return None
    if code:
        return f"exit code {code}"
    try:
        read_cell(table, cell)
    except RunError as error:
        return str(error)
    return None


def _diverged(table: Table, cell: Cell) -> bool:
    """Return whether the run diverged, if that is a result in this table."""
    summary = cell.run_dir / "summary.json"
    return "diverged" in table.settled and summary.exists() and read_status(cell.run_dir) == "diverged"


def _result(table: Table, cell: Cell) -> str:
    if _diverged(table, cell):
        return "diverged"
    quantity = QUANTITIES[table.metric]
    return f"{table.metric} {quantity.of(read_cell(table, cell)):{quantity.style}}"
