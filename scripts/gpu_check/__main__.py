"""Check the project on this machine's GPUs: correctness, waiting, races, speed, memory, failures.

python -m scripts.gpu_check [checks=1,2,7] [--quick]

Each check runs in its own processes and has a time limit: one that crashes or hangs has failed, and the others go on.
The table is also written to runs/report/gpu_check.{csv,md}; rows of checks that were not selected stay there as they
are. The kept one is written with output=results/benchmarks. Checks 9 and 10 need two GPUs; checks
7 and 8 let ranks share a single one.

Without a GPU the tests that emulate one are run instead, and nothing is written. device=cpu runs the logic of the
checks on CPUs with gloo at small sizes, for their own development: it says nothing about GPUs.

Exit codes: 0 nothing failed; 1 a check failed; 2 wrong arguments.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, field_validator

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from scripts.gpu_check import (
    failures,
    gossip,
    host_syncs,
    memory,
    optimizers,
    overlap,
    races,
    record,
    runs,
    speed,
    suite,
)
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.processes import run_check, tail

MODULE = "scripts.gpu_check"
EMULATED = ("tests/cuda", "tests/gpu_check/test_queued.py")


@dataclass(frozen=True)
class Check:
    """A check. timeout_s: after which it has failed."""

    title: str
    function: Callable[[Machine], str]
    timeout_s: float


CHECKS = {
    1: Check("tests with the GPU hidden, quickstart with it", suite.check, 1200),
    2: Check("versions of AccumAdam(W) agree", optimizers.check, 300),
    3: Check("no step waits for the GPU", host_syncs.check, 300),
    4: Check("messages and updates do not race", races.check, 300),
    5: Check("simulated workers, resumed runs", runs.check, 600),
    6: Check("times and speed", speed.check, 600),
    7: Check("ranks train as simulated workers do", gossip.check, 3600),
    8: Check("memory stays flat", memory.check, 600),
    9: Check("messages overlap computing", overlap.check, 600),
    10: Check("failures end the job", failures.check, 900),
}


class CheckArguments(Arguments):
    """Command line of scripts.gpu_check."""

    checks: Text = Field(",".join(map(str, CHECKS)), description=f"numbers from 1 to {len(CHECKS)}, as checks=1,2,7")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu: small sizes on CPUs, to develop the checks")
    quick: bool = Field(False, description="fewer tests in check 1, fewer ranks and cases in check 7")
    output: Text = Field("runs/report", description="where the table is written, as .csv and .md")

    @field_validator("checks")
    @classmethod
    def _known(cls, value: str) -> str:
        for number in value.split(","):
            if not number.isdecimal() or int(number) not in CHECKS:
                raise ValueError(f"expected numbers from 1 to {len(CHECKS)}, as checks=1,2,7")
        return value

    @property
    def chosen(self) -> list[int]:
        """The numbers, in order, each once."""
        return sorted(set(map(int, self.checks.split(","))))


@main_function
def main(argv: Sequence[str]) -> int:
    """Run the chosen checks and print the table; without a GPU, the tests that emulate one."""
    arguments = parse(CheckArguments, argv, MODULE, "Check the project on this machine's GPUs.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if arguments.device == "cuda" and not gpus:
        return run_emulated()
    on_gpu = arguments.device == "cuda"
    results = record.Record()
    with tempfile.TemporaryDirectory() as logs:
        for number in arguments.chosen:
            machine = Machine(
                arguments.device, gpus if on_gpu else 0, arguments.quick, str(Path(logs, f"{number}.log"))
            )
            run(number, machine, results)
    print(record.table(results.rows))
    if on_gpu:
        results.write(arguments.output, command_of(MODULE, arguments))
    return int(any(row["result"] == "failed" for row in results.rows))


def run(number: int, machine: Machine, results: record.Record) -> None:
    """Run one check, add its row, and show the end of its output if it failed."""
    check = CHECKS[number]
    print(f"{number}. {check.title} ...", flush=True)
    begin = time.monotonic()
    result, figure = run_check(check.function, machine, check.timeout_s)
    seconds = time.monotonic() - begin
    results.add(number, check.title, result, " ".join(figure.split()), seconds)
    log = Path(machine.log or "")
    if result == "failed" and log.is_file():
        print(tail(log.read_text(errors="replace")))
    print(f"   {result} after {seconds:.0f} s: {figure}", flush=True)


def run_emulated() -> int:
    """Say that there is no GPU, run the tests that emulate one, and return the exit code."""
    reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
    print(f"No GPU: {reason}. Running the tests that emulate one; no record is written.", flush=True)
    present = [path for path in EMULATED if Path(path).exists()]
    if not present:
        raise UsageError(f"expected one of {', '.join(EMULATED)}: run this in the repository's root")
    try:
        print(suite.run_tests(present, processes=1, marks=""))
    except FailedError as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
