"""Stand-ins for Slurm: its variables, and records of starts."""

from dataclasses import replace
from pathlib import Path
from typing import IO

from slurm.allocation import Allocation
from slurm.job import Attempt
from slurm.starts import Start

VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURMD_NODENAME": "node1",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_JOB_CPUS_PER_NODE": "64(x3),32",
}
SBATCH = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
env >"$CALLS.environment"
case "$*" in
*--test-only*) exit 0 ;;
*report.sbatch*) [ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }; echo 12 ;;
*) echo "11;cluster" ;;
esac
"""
START = Start(job="7", step=0, time="2026-01-01T00:00:00+00:00", nodes="node[1-4]")


def attempt(
    task: str,
    overrides: list[str],
    run: Path,
    log: IO[bytes],
    min_workers: int | None = None,
    count: int | None = None,
    per_worker: int = 1,
) -> Attempt:
    """One start of a job on four nodes; min_workers makes its run elastic."""
    config = {"run_dir": str(run), "elastic": {"min_workers": min_workers}, "workers": {"count": count}}
    config["parallel"] = {"ranks_per_worker": per_worker}
    return Attempt(Allocation.read(VARIABLES), task, overrides, config, log)


def started(run: Path, job: str, end: str | None = None) -> None:
    """A run that this job has started, first of all."""
    folder = run / "slurm" / "starts"
    folder.mkdir(parents=True)
    (folder / "0001.json").write_bytes(replace(START, job=job, end=end).content)
