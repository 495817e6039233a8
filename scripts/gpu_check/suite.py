"""Check 1: the tests pass with the GPU hidden, and the quickstart learns with the GPU visible."""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_check.outcome import FailedError, Machine, cores
from scripts.gpu_check.processes import run_program, tail

TESTS, QUICK_TESTS = ("tests",), ("tests/optim", "tests/parallel", "tests/simulate", "tests/topology")
MOST_PROCESSES = 8
QUICKSTART = ["rows=allreduce,accumadam_one_peer_exponential", "seeds=1"]
LEAST_ACCURACY = 90.0  # percent; the kept runs have 98
TESTS_S, QUICKSTART_S = 900.0, 300.0


def check(machine: Machine) -> str:
    """Run the fast tests, then some rows of the quickstart."""
    tests = run_tests(QUICK_TESTS if machine.quick else TESTS, min(MOST_PROCESSES, cores()))
    return f"{tests}; quickstart: {run_quickstart()}"


def run_tests(paths: Sequence[str], processes: int, marks: str = "not slow") -> str:
    """Run tests without a GPU and return pytest's summary. Raises FailedError if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "--durations=0", "--durations-min=60", *paths]
    command += ["-n", str(processes)] if processes > 1 else []
    code, output = run_program(command, TESTS_S, {"CUDA_VISIBLE_DEVICES": ""})
    summary = summary_of(output)
    if code:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        raise FailedError(f"{summary or tail(output)}{': ' if failed else ''}{', '.join(failed[:5])}")
    return summary


def summary_of(output: str) -> str:
    """Return pytest's last line, such as "3 passed, 1 skipped", without the time; empty if there is none."""
    found = re.findall(r"^=*\s*(\d+ (?:passed|failed|errors?|skipped)[^\n]*?) in [\d.]+s", output, re.MULTILINE)
    return found[-1] if found else ""


def run_quickstart() -> str:
    """Train rows of the quickstart as a user would and return their accuracies. Raises FailedError if one is poor."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "scripts.reproduce", "table=quickstart", *QUICKSTART, f"runs={runs}"]
        code, output = run_program(command, QUICKSTART_S)
        if code:
            raise FailedError(f"the quickstart ended with exit code {code}: {tail(output)}")
        summaries = {file: json.loads(file.read_text()) for file in sorted(Path(runs).rglob("summary.json"))}
    return judge({file.parent.parent.name: summary for file, summary in summaries.items()})


def judge(summaries: dict[str, dict]) -> str:
    """Return the accuracies of runs by name. Raises FailedError if there is none or one is too low."""
    accuracies = {name: summary["last"]["validation"]["accuracy"] for name, summary in summaries.items()}
    said = ", ".join(f"{name} {value:.1f} %" for name, value in accuracies.items())
    if not accuracies or min(accuracies.values()) < LEAST_ACCURACY:
        raise FailedError(f"accuracies {said or 'missing'}, expected at least {LEAST_ACCURACY:g} %")
    return said
