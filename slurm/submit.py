"""Submits the missing runs of a table: an array of jobs for each number of nodes, then a job that builds the table.

Everything about submitted jobs is asked of Slurm: an array's command names the file of its cells, so that nothing has
to be remembered here. `scripts.reproduce launcher=slurm` is the command line.
"""

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.cli import UsageError
from common.report.definitions import ROOT
from common.report.registry import Cell, Table
from slurm.starts import last_job

logger = logging.getLogger(__name__)

CLUSTERS = ROOT / "slurm" / "clusters"
DEFAULT_CLUSTER = "one_node_cpu"
TIMEOUT_S = 60

# Options of sbatch that are read here; all others are only handed on.
SIZES = ("nodes", "gpus-per-node", "ntasks-per-node")
ACCOUNTS = ("account", "partition", "qos", "reservation")  # what the job that builds the table needs too
TOTALS = ("-G", "--gpus", "--gpus-per-task")  # what does not say how many ranks a node has
SHORT = {"nodes": "-N", "account": "-A", "partition": "-p", "qos": "-q"}


class Gres(argparse.Action):
    """--gres=gpu[:type][:count] means --gpus-per-node; other resources stay."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # noqa: ANN001
        """As argparse wants it."""
        others = []
        for resource in values.split(","):
            name, _, count = resource.partition(":")
            if name == "gpu":
                setattr(
                    namespace, "gpus-per-node", count if count.split(":")[-1].isdecimal() else f"{count}:1".lstrip(":")
                )
            else:
                others.append(resource)
        if others:
            namespace.gres = ",".join(others)


@dataclass(frozen=True)
class Cluster:
    """Options of sbatch: those of a file in slurm/clusters, then those that the user adds, which win.

    known:  values of SIZES and ACCOUNTS that are given, and of --gres but for GPUs
    others: as they were written
    """

    known: Mapping[str, str]
    others: tuple[str, ...]

    @classmethod
    def load(cls, name: str, more: str | None = None) -> "Cluster":
        """The preset `name`, or a file of the user's; UsageError if there is none, or if options do not fit."""
        presets = {file.name: file for file in sorted(CLUSTERS.iterdir())}
        file = presets.get(name, Path(name))
        if not file.is_file():
            raise UsageError(
                f"cluster={name}: expected a file of yours, or one of slurm/clusters: {', '.join(presets)}"
            )
        lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for option in (*SIZES, *ACCOUNTS):
            parser.add_argument(*filter(None, [SHORT.get(option)]), f"--{option}", dest=option)
        parser.add_argument("--gres", action=Gres)
        parser.add_argument(*TOTALS, dest="total")
        given, others = parser.parse_known_args([*lines, *shlex.split(more or "")])
        values = {option: value for option, value in vars(given).items() if value is not None}
        if "total" in values:
            raise UsageError(f"cluster, sbatch: {' '.join(TOTALS)}: expected --gpus-per-node instead")
        return cls(values, tuple(others))

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU; without GPUs as many as --ntasks-per-node says."""
        ranks = self.known.get("gpus-per-node") or self.known.get("ntasks-per-node") or "1"
        count = ranks.split(":")[-1]
        if not count.isdecimal():
            raise UsageError(f"ranks of a node: {ranks} (cluster, sbatch): expected a number, such as 4 or a40:4")
        return int(count)

    def for_ranks(self, ranks: int) -> tuple[str, ...]:
        """The options with as many nodes as so many ranks need; UsageError if they do not fill their nodes."""
        nodes, left = divmod(ranks, self.ranks_per_node)
        if left:
            raise UsageError(
                f"{ranks} ranks on nodes of {self.ranks_per_node} (cluster, sbatch): expected a multiple of it"
            )
        return (*self._options(*SIZES[1:], "gres", *ACCOUNTS), *self.others, f"--nodes={nodes}")

    def for_report(self, more: str | None) -> tuple[str, ...]:
        """Who pays, and where it runs; what the user adds wins."""
        return (*self._options(*ACCOUNTS), *shlex.split(more or ""))

    def _options(self, *names: str) -> tuple[str, ...]:
        return tuple(f"--{name}={self.known[name]}" for name in names if name in self.known)


def ranks_of(cell: Cell) -> int:
    """Processes that a cell's run takes: 1 if its workers are simulated. UsageError if it cannot be composed."""
    from common.training.compose import compose_config
    from common.training.config import ConfigError

    try:
        config = compose_config(cell.task, list(cell.settings))
    except ConfigError as error:
        raise UsageError(f"{cell.label}: {error}") from error
    return config.ranks if config.workers.kind == "processes" else 1


def submitted(table: Table, runs: Path) -> dict[Path, str]:
    """Run folders of cells that wait or run in Slurm now, with the state as Slurm names it and the job's id.

    They are elements of an array that was submitted here, or were started by another job, such as a row's file.
    """
    states, found = {}, {}
    for line in _slurm("squeue", "--me", "--noheader", "--array", "--format=%A %K %T %o").splitlines():
        job, element, state, command = (*line.split(maxsplit=3), "")[:4]
        states[job] = f"{state.lower()} (job {job})"
        match = re.search(r" --cells (.+)", command)
        if match and Path(match[1]).parent == folder(table, runs):
            try:
                cell = json.loads(Path(match[1]).read_text().splitlines()[int(element)])
            except (OSError, ValueError, IndexError) as error:
                logger.warning("job %s: %s: what it trains is not known (%s)", job, match[1], error)
                continue
            found[folder_of(cell)] = states[job]
    started = {cell.run_dir: last_job(cell.run_dir) for cell in table.cells(runs)}
    return {run_dir: states[job] for run_dir, job in started.items() if job in states} | found


def ended(run_dir: Path) -> str | None:
    """How Slurm says that the folder's last job ended; None if it does not know."""
    job = last_job(run_dir)
    if job is None:
        return None
    accounting = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State"]
    for command, pattern in ((accounting, r"^([A-Z_]+)"), (["scontrol", "show", "job", "-o", job], r"JobState=(\w+)")):
        try:
            match = re.search(pattern, _slurm(*command))
        except UsageError:
            continue  # without accounting sacct fails; Slurm forgets old jobs
        if match:
            return f"{match[1].lower()} (job {job})"
    return None


def sized(cells: Sequence[Cell], cluster: Cluster) -> dict[tuple[str, ...], list[Cell]]:
    """These cells by the options of sbatch that they need; UsageError if a cell cannot be composed."""
    rows = {cell.run_dir.parent: cell for cell in cells}
    options = {row: cluster.for_ranks(ranks_of(cell)) for row, cell in rows.items()}  # the same for all seeds
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(options[cell.run_dir.parent], []).append(cell)
    return groups


def submit(table: Table, cells: Sequence[Cell], runs: Path, cluster: Cluster) -> list[str]:
    """Submit these cells; returns the ids of their arrays.

    Raises UsageError if Slurm refuses; what was submitted before is cancelled then.
    """
    groups = sized(cells, cluster)
    for options in groups:  # all of them before the first is submitted
        _slurm("sbatch", "--test-only", *options, "slurm/train.sbatch")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    jobs: list[str] = []
    try:
        for number, (options, of_size) in enumerate(groups.items()):
            file = folder(table, runs) / f"{stamp}-{os.getpid()}-{number}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps([c.task, *c.overrides]) + "\n" for c in of_size))
            array = [f"--array=0-{len(of_size) - 1}", f"--job-name={table.name}", f"--output={file.parent}/%A_%a.log"]
            jobs.append(sbatch(*array, *options, "slurm/train.sbatch", "--cells", str(file)))
    except UsageError:
        if jobs:
            _slurm("scancel", *jobs)
        raise
    return jobs


def report_command(table: Table, jobs: Sequence[str], runs: Path, options: Sequence[str]) -> list[str]:
    """sbatch's arguments for the job that builds table and figure when these have ended."""
    return [
        f"--dependency=afterany:{':'.join(jobs)}",  # also if some fail: then the table names them
        "--kill-on-invalid-dep=yes",
        f"--job-name={table.name}-report",
        f"--output={folder(table, runs)}/%j.log",
        *options,
        "slurm/report.sbatch",
        f"table={table.name}",
        f"runs={runs}",
    ]


def folder(table: Table, runs: Path) -> Path:
    """Where the files of a table's arrays and their logs lie: absolute, as Slurm knows jobs of other folders, too."""
    return (runs / table.runs / "slurm").resolve()


def folder_of(cell: Sequence[str]) -> Path:
    """The run folder that the overrides of a cell's line name."""
    from common.report.registry import parse_override

    return Path(next(value for key, value in map(parse_override, cell[1:]) if key == "run_dir"))


def sbatch(*arguments: str) -> str:
    """Submit a job; returns its id. UsageError if Slurm refuses."""
    return _slurm("sbatch", "--parsable", *arguments).strip().split(";")[0]


def _slurm(program: str, *arguments: str) -> str:
    """A Slurm command's output; UsageError with its own words if it fails."""
    if shutil.which(program) is None:
        raise UsageError(f"launcher=slurm: {program} is not installed here; submit from a login node of your cluster")
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{shlex.join(command)}: no answer within {TIMEOUT_S} s") from error
    if done.returncode:
        raise UsageError(f"{shlex.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
