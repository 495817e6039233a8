"""What this machine's GPUs can show, in order of value and in GPU_MINUTES (25): python -m tests.gpu [CHECK ...].

Each check is a file of tests in a process of its own: one that crashes leaves its row in the record, and the others go
on. Started again, it goes on: what has passed with the same commit, versions and hardware is not made again, unless it
is named. What no longer fits into the time is skipped, and its row says so.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from common.interruptible import interruptible
from tests.gpu.record import GpuRecord

CHECKS = ("ranks", "host_syncs", "races", "memory", "optimizers", "speed", "runs")
CHECKS += ("overlap", "failures", "elastic")  # which need several GPUs
CHECKS += ("suite", "matched")  # the last one takes all the time that is left
LEAST_S = 60.0  # without which none begins
EMULATED = ("-m", "not gpu", "tests/cuda", "tests/gpu/test_races.py")

Run = Callable[[str, float], bool]


def pytest_on(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-n", "0", *arguments]


def run(name: str, limit_s: float) -> bool:
    """Run the tests of a check; return whether they have ended in time. None of their processes stays."""
    file = f"tests/gpu/test_{name}.py"
    known = os.environ | {"GPU_LEFT_S": f"{limit_s:.0f}"}
    process = subprocess.Popen(pytest_on("-m", "gpu", file), env=known, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def check_all(record: GpuRecord, names: Sequence[str], end: float, run: Run = run) -> bool:
    """Run these checks (none: those that have not passed here) until `time.monotonic()` is `end`; return if none fails.

    run: (check, seconds that are left) -> whether it has ended in time
    """
    numbers = {}
    for name in names or CHECKS:
        check = number, _ = import_module(f"tests.gpu.test_{name}").CHECK
        numbers[number] = name
        if not names and record.passed_here(number):
            print(f"{name}: has passed here")
            continue
        former, left = record.rows.get(number, {}), end - time.monotonic()
        needed = max(LEAST_S, former["seconds"] if former.get("result") == "passed" else 0.0)
        if left < needed:
            reason = f"no time: it takes {needed:.0f} s or more, and {max(0.0, left):.0f} s were left"
            record.add(check, name, "skipped", [reason], 0.0)
        elif not run(name, left):
            record.add(check, name, "skipped", [f"did not end in the {left:.0f} s that were left"], left)
    return not any(record.rows[number]["result"] == "failed" for number in numbers)


@interruptible
def main(names: Sequence[str]) -> int:
    """Run the checks of these names, or all; without a GPU the tests that emulate one."""
    if unknown := set(names) - set(CHECKS):
        print(f"error: {' '.join(sorted(unknown))}: expected some of {' '.join(CHECKS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("No GPU: running the tests that emulate one; no record is written.", flush=True)
        return subprocess.call(pytest_on(*EMULATED))
    folder = os.environ["GPU_RECORD"]
    end = time.monotonic() + 60 * float(os.environ.get("GPU_MINUTES", "25"))
    passed = check_all(GpuRecord(folder), names, end)
    print(f"written: {folder}/gpu_check.csv and .md")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
