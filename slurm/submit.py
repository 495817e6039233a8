"""Submits the missing runs of a table: an array of jobs for each number of nodes, then a job that builds the table.

Everything about submitted jobs is asked of Slurm: an array's command names the file of its cells, so that nothing has
to be remembered here. `scripts.reproduce launcher=slurm` is the command line.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.report.cli import UsageError
from common.report.registry import ROOT, Cell, Table

CLUSTERS = ROOT / "slurm" / "clusters"
TIMEOUT_S = 60


@dataclass(frozen=True)
class Cluster:
    """Options of sbatch: those of a file in slurm/clusters, then those that the user adds."""

    options: tuple[str, ...]

    @classmethod
    def load(cls, name: str | None, more: str | None = None) -> "Cluster":
        """The preset `name`, none if it is None; UsageError if there is no such file."""
        lines: list[str] = []
        if name is not None:
            known = sorted(file.name for file in CLUSTERS.iterdir())
            if name not in known:
                raise UsageError(f"cluster={name}: expected one of: {', '.join(known)} (files of slurm/clusters)")
            lines = (CLUSTERS / name).read_text().splitlines()
        return cls((*(line for line in lines if not line.startswith("#")), *shlex.split(more or "")))

    def number(self, name: str) -> int | None:
        """The value of `--name=...`; None if it is not given."""
        values = [option.split("=", 1)[1] for option in self.options if option.startswith(f"--{name}=")]
        return int(values[-1].split(":")[-1]) if values else None

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU; without GPUs as many as --ntasks-per-node says."""
        return self.number("gpus-per-node") or self.number("ntasks-per-node") or 1

    def for_ranks(self, ranks: int) -> tuple[str, ...]:
        """The options with as many nodes as so many ranks need; UsageError if they do not fill their nodes."""
        nodes, left = divmod(ranks, self.ranks_per_node)
        if left:
            raise UsageError(
                f"{ranks} ranks on nodes of {self.ranks_per_node} (cluster, sbatch): expected a multiple of it"
            )
        return (*(option for option in self.options if not option.startswith("--nodes=")), f"--nodes={nodes}")


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
    """Run folders of cells that wait or run in Slurm now, with the state as Slurm names it and the job's id."""
    lines = _slurm("squeue", "--me", "--noheader", "--array", "--format=%A %K %T %o").splitlines()
    found = {}
    for line in lines:
        match = re.fullmatch(r"(\d+) (\d+) (\w+) .*--cells (\S+)", line.strip())
        if match:
            job, element, state, file = match.groups()
            if Path(file).parent.resolve() == folder(table, runs).resolve():
                cell = json.loads(Path(file).read_text().splitlines()[int(element)])
                found[run_dir_of(cell)] = f"{state.lower()} (job {job})"
    return found


def ended(run_dir: Path) -> str | None:
    """How Slurm says that the folder's last job ended; None if it does not know."""
    starts = run_dir / "slurm" / "starts.jsonl"
    if not starts.exists():
        return None
    job = json.loads(starts.read_text().splitlines()[-1])["job"]
    accounting = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State"]
    for command, pattern in ((accounting, r"^([A-Z_]+)"), (["scontrol", "show", "job", "-o", job], r"JobState=(\w+)")):
        try:
            match = re.search(pattern, _slurm(*command))
        except UsageError:
            continue  # without accounting sacct fails; Slurm forgets old jobs
        if match:
            return f"{match[1].lower()} (job {job})"
    return None


def submit(table: Table, cells: Sequence[Cell], runs: Path, cluster: Cluster, name: str) -> list[str]:
    """Submit these cells, and the table's report after them; returns the jobs' ids, the report's last.

    Raises UsageError if Slurm refuses; what was submitted before is cancelled then.
    """
    rows = {cell.row.name: cell for cell in cells}
    ranks = {name: ranks_of(cell) for name, cell in rows.items()}  # the same for all seeds
    sizes: dict[int, list[Cell]] = {}
    for cell in cells:
        sizes.setdefault(ranks[cell.row.name], []).append(cell)
    groups = [(cluster.for_ranks(ranks), of_size) for ranks, of_size in sizes.items()]
    for options, _ in groups:  # all of them before the first is submitted
        _slurm("sbatch", "--test-only", *options, "slurm/train.sbatch")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    jobs: list[str] = []
    try:
        for number, (options, of_size) in enumerate(groups):
            file = folder(table, runs) / f"{stamp}-{os.getpid()}-{number}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps([c.task, *c.overrides]) + "\n" for c in of_size))
            array = [f"--array=0-{len(of_size) - 1}", f"--job-name={name}", f"--output={file.parent}/%A_%a.log"]
            jobs.append(_sbatch(*array, *options, "slurm/train.sbatch", "--cells", str(file)))
        after = f"--dependency=afterany:{':'.join(jobs)}"  # also if some fail: then the table names them
        report = [f"--output={folder(table, runs)}/%j.log", f"--job-name={name}-report", "--kill-on-invalid-dep=yes"]
        jobs.append(_sbatch(after, *report, "slurm/report.sbatch", f"table={table.name}", f"runs={runs}"))
    except UsageError:
        if jobs:
            _slurm("scancel", *jobs)
        raise
    return jobs


def folder(table: Table, runs: Path) -> Path:
    """Where the files of a table's arrays and their logs lie."""
    return runs / table.runs / "slurm"


def run_dir_of(cell: Sequence[str]) -> Path:
    """The run folder that the overrides of a cell's line name."""
    from common.report.registry import parse_override

    return Path(next(value for key, value in map(parse_override, cell[1:]) if key == "run_dir"))


def _sbatch(*arguments: str) -> str:
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
