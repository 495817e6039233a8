"""Check what this machine's GPUs can show, in order of value and within a time.

python -m tests.gpu [minutes=25] [checks=[races,memory]] [record=runs/report]

Each check is a file of tests that runs in its own process, so a crash ends that check alone and is recorded in its row.
The same command continues after an interruption: a check that has passed with this commit, these versions and this
hardware is not repeated unless it is named. A check for which no time is left is skipped, and its row says so.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat

from common.cli import ONE_OR_SEVERAL, Arguments, Text, main_function, parse
from common.interruptible import interruptible
from tests.gpu.record import GpuRecord

CHECKS = ("ranks", "host_syncs", "races", "memory", "optimizers", "speed", "runs")
CHECKS += ("overlap", "failures", "elastic")  # which need several GPUs
CHECKS += ("suite", "matched")  # the last one takes all the time that is left
LEAST_S = 60.0  # without which none begins
EMULATED = ("-m", "not gpu", "tests/cuda", "tests/gpu/test_races.py")

Run = Callable[[str, float], bool]


class GpuArguments(Arguments):
    """Command line of tests.gpu."""

    minutes: PositiveFloat = Field(25, description="for all checks together")
    checks: Annotated[tuple[Literal[CHECKS], ...], ONE_OR_SEVERAL] = Field((), description="only these (default: all)")
    record: Text = Field("runs/report", description="the folder of gpu_check.csv and .md")


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


@main_function
@interruptible
def main(argv: Sequence[str]) -> int:
    """Run the checks, or without a GPU the tests that emulate one."""
    arguments = parse(GpuArguments, argv, "tests.gpu", "Check what this machine's GPUs can show.")
    if not torch.cuda.is_available():
        print("No GPU: running the tests that emulate one; no record is written.", flush=True)
        return subprocess.call(pytest_on(*EMULATED))
    os.environ["GPU_RECORD"] = arguments.record  # for the processes of the checks
    end = time.monotonic() + 60 * arguments.minutes
    passed = check_all(GpuRecord(arguments.record), arguments.checks, end)
    print(f"written: {arguments.record}/gpu_check.csv and .md")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
