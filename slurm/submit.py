"""Submit runs of a table: a job array for each set of sbatch options, then a job that follows them.

A cell is a run of a table. An array's command names the file that lists its cells, so that Slurm itself knows what was
submitted and nothing else has to be remembered. `scripts.reproduce launcher=slurm` is the command line.
"""

import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from common.cli import UsageError
from common.experiments.tables import Cell, Table
from slurm.options import DEFAULT_CLUSTER, SbatchOptions
from slurm.queue import ask, folder


def sized(table: Table, cells: Sequence[Cell], name: str | None, more: str | None) -> dict[tuple[str, ...], list[Cell]]:
    """Group the cells by the sbatch options that they need: their cluster's, and the nodes for their ranks.

    name: the cluster for all rows; None: each row's or the table's; more: further options of sbatch
    Raises UsageError if a cell cannot be composed or does not fit the cluster.
    """
    rows = {cell.run_dir.parent: cell for cell in cells}  # all seeds of a row need the same
    options = {
        row: SbatchOptions.load(name or cell.row.cluster or table.cluster or DEFAULT_CLUSTER, more).for_ranks(
            ranks_of(cell)
        )
        for row, cell in rows.items()
    }
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(options[cell.run_dir.parent], []).append(cell)
    return groups


def ranks_of(cell: Cell) -> int:
    """Return the number of ranks of a cell's run: 1 if its workers are simulated.

    Raises UsageError if its configuration cannot be composed.
    """
    from common.config.config import ConfigError
    from common.launch.compose import compose_config

    try:
        config = compose_config(cell.task, list(cell.settings))
    except ConfigError as error:
        raise UsageError(f"{cell.label}: {error}") from error
    return config.ranks if config.workers.kind == "processes" else 1


def split(groups: dict[tuple[str, ...], list[Cell]]) -> list[tuple[tuple[str, ...], list[Cell]]]:
    """Return the groups, split into parts where they exceed the largest array that this Slurm allows (MaxArraySize)."""
    try:
        match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    except UsageError:
        match = None  # then --test-only says whether Slurm takes them
    if match and int(match[1]) == 0:
        raise UsageError("MaxArraySize=0: this Slurm takes no job arrays; --dry-run shows a command for each run")
    parts = []
    for options, cells in groups.items():
        most = int(match[1]) if match else len(cells)
        parts += [(options, cells[first : first + most]) for first in range(0, len(cells), most)]
    return parts


def submit(table: Table, groups: dict[tuple[str, ...], list[Cell]], runs: Path) -> list[str]:
    """Submit these cells, an array for each group; return the arrays' ids.

    Raises UsageError if Slurm refuses one of them; arrays that were submitted before it are cancelled.
    """
    parts = split(groups)
    for options, cells in parts:  # all of them before the first is submitted
        try:
            ask("sbatch", "--test-only", f"--array=0-{len(cells) - 1}", *options, "slurm/train.sbatch")
        except UsageError as error:
            if "array" not in str(error).partition("slurm/train.sbatch: ")[2]:
                raise
            raise UsageError(
                f"{error}; {len(cells)} runs may be more than an array of this Slurm takes (MaxArraySize): submit them "
                "in parts, by rows=... or seeds=..."
            ) from error
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    jobs: list[str] = []
    try:
        for number, (options, cells) in enumerate(parts):
            file = folder(table, runs) / f"{stamp}-{os.getpid()}-{number}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps([c.task, *c.overrides]) + "\n" for c in cells))
            array = [f"--array=0-{len(cells) - 1}", f"--job-name={table.name}", f"--output={file.parent}/%A_%a.log"]
            jobs.append(sbatch(*array, *options, "slurm/train.sbatch", "--cells", str(file)))
    except UsageError:
        if jobs:
            ask("scancel", *jobs)
        raise
    return jobs


def after(table: Table, jobs: Sequence[str], runs: Path, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return sbatch's arguments for a job that begins when these jobs have ended.

    command: a file of slurm/, after which the job is named, and its arguments
    """
    return [
        f"--dependency=afterany:{':'.join(jobs)}",  # even if some fail: the job says which
        "--kill-on-invalid-dep=yes",
        f"--job-name={table.name}-{Path(command[0]).stem}",
        f"--output={folder(table, runs)}/%j.log",
        *options,
        *command,
    ]


def sbatch(*arguments: str) -> str:
    """Submit a job and return its id; raise UsageError if Slurm refuses it."""
    return ask("sbatch", "--parsable", *arguments).strip().split(";")[0]
