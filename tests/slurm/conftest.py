"""A real Slurm of four virtual nodes, brought up once for these tests by slurm/local/up.sh."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.report.registry import ROOT

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
# A job of two nodes with two CPU ranks each.
FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2")


@dataclass
class Slurm:
    """Commands of the local Slurm; every wait is bounded."""

    environment: dict[str, str]
    logs: Path

    def call(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command in the repository's root."""
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=check
        )

    def sbatch(self, *arguments: str) -> str:
        """Submit; returns the job's id."""
        return self.call("sbatch", "--parsable", f"--output={self.logs}/%j.log", *arguments).stdout.strip()

    def state(self, job: str) -> str:
        """As Slurm names it."""
        line = self.call("scontrol", "show", "job", "-o", job).stdout
        return line.split("JobState=")[1].split()[0]

    def wait(self, job: str, timeout_s: float = 200) -> str:
        """Wait until the job has ended; returns its last state."""
        self.until(lambda: self.state(job) in ENDED, job, timeout_s)
        return self.state(job)

    def until(self, condition: Callable[[], bool], job: str, timeout_s: float = 200) -> None:
        """Wait for a condition; fails with the job's log when the time is over."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"job {job} is {self.state(job)} after {timeout_s} s:\n{self.log(job)}")
            time.sleep(0.2)

    def log(self, job: str) -> str:
        """What the job has written so far."""
        file = self.logs / f"{job}.log"
        return file.read_text() if file.exists() else ""


@pytest.fixture(scope="package")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The local Slurm; the tests are skipped, with the reason, where it cannot be started."""
    logs = tmp_path_factory.mktemp("slurm_logs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    # Two test runs on one machine would meet in the daemons' ports: up.sh refuses the second one.
    environment |= {"STATE": "/run/slurm-tests", "NODES": "4", "CPUS": "4", "OMP_NUM_THREADS": "1"}
    environment |= {"VENV": str(Path(os.environ.get("VIRTUAL_ENV", ROOT / ".venv")))}
    up = subprocess.run(
        ["slurm/local/up.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    if up.returncode:
        pytest.skip(f"slurm/local/up.sh: {(up.stderr or up.stdout).strip().splitlines()[-1]}")
    environment["SLURM_CONF"] = up.stdout.strip().splitlines()[-1].removeprefix("export SLURM_CONF=")
    yield Slurm(environment, logs)
    subprocess.run(["slurm/local/down.sh"], cwd=ROOT, env=environment, capture_output=True, timeout=120, check=True)
