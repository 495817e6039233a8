"""The starts of a run's jobs: RUN_DIR/slurm/starts/0001.json, 0002.json, ...

They are also the run's lock: a job that begins creates the next file, and of two jobs only one can.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from common.atomic import write_atomically
from common.record import BAD_CONFIGURATION, FAILED, FOLDERS
from slurm.allocation import JobError, answer

PATIENCE_S = 600.0  # long before that, Slurm kills a job that does not end
RETRY_S = 5.0
WITHOUT_PROGRESS = 2
STOPPED = "stopped"


@dataclass(frozen=True)
class Start:
    """One start.

    step: of the checkpoint from which it continued
    end:  finished, saved, failed, node failure, or stopped by Slurm (preemption, scancel); None: not known (yet)
    """

    job: str
    step: int
    time: str
    nodes: str
    end: str | None = None

    @property
    def content(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def begin(run_dir: Path, job: str, nodes: str, tell: Callable[[str], None]) -> Path:
    """Record this start and return its file.

    Raises JobError if another job is training the run, or if this job's last starts made no progress.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        earlier = read(run_dir)
        last = earlier[-1] if earlier else None
        other = last.job if last and last.job != job and last.end in (None, STOPPED) else None
        state = state_of(other) if other else ""
        if state in ("RUNNING", "SUSPENDED"):
            raise JobError(f"run_dir={run_dir}: job {other} is training it now", BAD_CONFIGURATION)
        if state not in ("COMPLETING", "UNKNOWN"):
            step = newest_step(run_dir)
            _check_progress(earlier, job, step)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            file = run_dir / "slurm" / "starts" / f"{len(earlier) + 1:04d}.json"
            if _create(file, Start(job, step, now, nodes)):
                return file
            state = "beginning"  # another job was faster; a shared file system may show its file late
        waits_for = f"job {other or '(another one)'}: {state.lower()}"
        if time.monotonic() > give_up:
            raise JobError(
                f"run_dir={run_dir}: waited {PATIENCE_S:.0f} s for {waits_for}; the same sbatch command tries again",
                FAILED,
            )
        tell(f"waiting for {waits_for}")
        time.sleep(RETRY_S)


def end(file: Path, how: str) -> None:
    """Record how the start in this file ended."""
    write_atomically(file, replace(_read(file), end=how).content)


def read(run_dir: Path) -> list[Start]:
    """Return all starts, in order."""
    return [_read(file) for file in sorted((run_dir / "slurm" / "starts").glob("*.json"))]


def last_job(run_dir: Path) -> str | None:
    """Return the id of the job that started this run last; None if there was none."""
    starts = read(run_dir)
    return starts[-1].job if starts else None


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    return max((int(f.parent.name[5:]) for f in run_dir.glob(f"checkpoints/{FOLDERS}/manifest.json")), default=0)


def state_of(job: str) -> str:
    """Return a job's state in Slurm's words; empty if it has forgotten the job, UNKNOWN if it does not answer."""
    done = answer("squeue", "-h", "-j", job, "-o", "%A %T")  # an array's id stands for all its elements
    if done is None or done.returncode:
        return "" if done and "Invalid job id" in done.stderr else "UNKNOWN"
    return dict(line.split() for line in done.stdout.splitlines()).get(job, "")


def _check_progress(earlier: list[Start], job: str, step: int) -> None:
    """Raise JobError if this job's last starts got no further than this step, not counting preemption."""
    began = [start.step for start in earlier if start.job == job and start.end != STOPPED][-WITHOUT_PROGRESS:]
    if began == [step] * WITHOUT_PROGRESS:
        raise JobError(
            f"job {job} began {len(began)} times at step {step} and got no further: it stops; the same sbatch command "
            "tries again",
            FAILED,
        )


def _read(file: Path) -> Start:
    return Start(**json.loads(file.read_text()))


def _create(file: Path, start: Start) -> bool:
    """Create the file with its content atomically; return False if another job was faster."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mine = file.with_name(f".{start.job}.tmp")
    mine.write_bytes(start.content)
    try:
        os.link(mine, file)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True
