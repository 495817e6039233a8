"""Check 10: a rank that dies, raises or stands still ends the job in time, the peer is named, and the run continues."""

import re
import sys
import tempfile
import time
from pathlib import Path

from scripts.gpu_check.faulty import task
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.processes import run_program, tail

RANKS = 2
TIMEOUT_S = 20.0  # parallel.timeout_s
# Seconds from the fault to the end of the job; elastic waits 30 s for a stopped process before it kills it.
END_WITHIN_S = {"kill": 20.0, "raise": 20.0, "stop": TIMEOUT_S + 60.0}
NAMED = {
    "kill": r"worker process 1 died|rank\(s\) \[[^\]]*\b1\b",
    "raise": r"rank 1 failed:[\s\S]*ValueError: this rank fails on purpose",
    "stop": r"rank\(s\) \[[^\]]*\b1\b",
}
RUN = ["task=scripts.gpu_check.faulty", f"workers.count={RANKS}", "topology=one_peer_exponential", "model.width=8"]
RUN += ["training.steps=40", "training.checkpoint_every=10", "evaluation.every=40", "schedule.warmup=3"]
RUN += ["logging.progress=false", f"parallel.timeout_s={TIMEOUT_S:g}", "resume=true"]
PROGRAM_S = 240.0


def check(machine: Machine) -> str:
    """Let rank 1 fail in each way, then continue."""
    machine.require_gpus(RANKS)
    seconds = {how: fail(machine, how) for how in END_WITHIN_S}
    shown = ", ".join(f"{how} {value:.0f} s" for how, value in seconds.items())
    return f"from the fault to the end of the job: {shown}; each run continued"


def fail(machine: Machine, how: str) -> float:
    """Let rank 1 of a run fail, continue it, and return the seconds from the fault to the end of the job.

    Raises FailedError if the job ends late or well, names no peer, or cannot be continued.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "cnn.train", *RUN, f"training.device={machine.device}", f"run_dir={run}"]
        code, output = run_program(command, PROGRAM_S, {task.FAULT: how})
        ended = time.time()
        if not (run / task.MARK).exists():
            raise FailedError(f"{how}: the run ended with exit code {code} before rank 1 failed: {tail(output)}")
        seconds = ended - float((run / task.MARK).read_text())
        judge(how, code, seconds, output)
        code, output = run_program(command, PROGRAM_S)
        if code or "resumed at step" not in output:
            raise FailedError(f"{how}: continuing ended with exit code {code}: {tail(output)}")
        return seconds


def judge(how: str, code: int, seconds: float, output: str) -> None:
    """Raise FailedError if a failed job ended well, late or without naming the rank that failed."""
    if code == 0:
        raise FailedError(f"{how}: the job ended with exit code 0")
    if seconds > END_WITHIN_S[how]:
        raise FailedError(f"{how}: the job ended after {seconds:.0f} s, expected {END_WITHIN_S[how]:g} s")
    if not re.search(NAMED[how], output):
        raise FailedError(f"{how}: nobody names rank 1: {tail(output)}")
