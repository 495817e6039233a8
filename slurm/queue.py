"""Ask Slurm what is queued or running, and how a run's last job ended."""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from common.cli import UsageError
from common.experiments.definitions import parse_override
from common.experiments.tables import Table
from slurm.starts import last_job

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
HANDED_ON = ("SLURM_CONF", "SLURM_CLUSTERS")


def submitted(table: Table, runs: Path, timeout_s: float = TIMEOUT_S) -> dict[Path, str]:
    """Return {absolute run folder: state and job} of the table's runs that wait or run in Slurm now.

    They are elements of the table's arrays, or were started by another job (slurm/train.sbatch). Raises UsageError if
    Slurm does not answer.
    """
    states, found = {}, {}
    listing = ask("squeue", "--me", "--noheader", "--array", "--format=%A %i %K %T %o", timeout_s=timeout_s)
    for line in listing.splitlines():
        job, shown, element, state, command = (*line.split(maxsplit=4), "")[:5]
        states[job] = f"{state.lower()} (job {shown})"  # the element's separate job id is rarely seen
        match = re.search(r" --cells (.+)", command)
        if match and Path(match[1]).parent == folder(table, runs):
            try:
                cell = json.loads(Path(match[1]).read_text().splitlines()[int(element)])
            except (OSError, ValueError, IndexError) as error:
                logger.warning("job %s: %s: what it trains is not known (%s)", shown, match[1], error)
                continue
            run_dir = next(value for key, value in map(parse_override, cell[1:]) if key == "run_dir")
            found[Path(run_dir).resolve()] = states[job]
    started = {cell.run_dir.resolve(): last_job(cell.run_dir) for cell in table.cells(runs)}
    return {run_dir: states[job] for run_dir, job in started.items() if job in states} | found


def ended(run_dir: Path) -> str | None:
    """Return how the run's last job ended according to Slurm; None if it does not know."""
    job = last_job(run_dir)
    if job is None:
        return None
    accounting = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State"]
    for command in (accounting, ["scontrol", "show", "job", "-o", job]):
        try:
            answer = ask(*command)
        except UsageError:
            continue  # without accounting sacct fails; Slurm forgets old jobs
        if state := re.search(r"(?:^\w+\||JobState=)([A-Z_]+)", answer):
            element = re.search(r"^(\d+)_(\d+)\|", answer) or re.search(r"ArrayJobId=(\d+) ArrayTaskId=(\d+) ", answer)
            return f"{state[1].lower()} (job {'_'.join(element.groups()) if element else job})"
    return None


def folder(table: Table, runs: Path) -> Path:
    """Return the folder of the array files and logs of a table, absolute, to compare it with the paths of jobs."""
    return (runs / table.runs / "slurm").resolve()


def ask(program: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return a Slurm command's output; raise UsageError with its message if it fails."""
    if shutil.which(program) is None:
        raise UsageError(f"launcher=slurm: {program} is not installed here; submit from a login node of your cluster")
    command = [program, *arguments]
    try:
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{shlex.join(command)}: no answer within {timeout_s:g} s") from error
    if done.returncode:
        raise UsageError(f"{shlex.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Return this process's environment variables, without any that describe the job it runs in.

    sbatch would pass them on, and the new job and its srun would take them for their own.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {n: v for n, v in os.environ.items() if n in HANDED_ON or not n.startswith(("SLURM_", "SLURMD_"))}
