"""A real Slurm of four virtual nodes, brought up once for these tests by slurm/local/up.sh."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.experiments.definitions import ROOT
from tests.slurm.fakes import SBATCH
from tests.waiting import LIMIT_S

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
# A job of two nodes. The local Slurm only claims to have GPUs; each means one rank.
FOUR_GPUS = ("--nodes=2", "--gpus-per-node=2")
TWO_RANKS = ("--nodes=2", "--ntasks-per-node=1")
NODES = ("node1", "node2", "node3", "node4")


@dataclass
class Slurm:
    """Commands of the local Slurm; every wait has a limit."""

    environment: dict[str, str]
    logs: Path

    def call(self, *command: str, check: bool = True, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """A command, in the repository's root if no other folder is given."""
        return subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=check
        )

    def sbatch(self, *arguments: str, folder: Path = ROOT) -> str:
        """Submit; returns the job's id."""
        output = f"--output={self.logs}/%j.log"
        return self.call("sbatch", "--parsable", output, *arguments, folder=folder).stdout.strip()

    def state(self, job: str) -> str:
        """As Slurm names it."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Of what `scontrol show job` says."""
        line = self.call("scontrol", "show", "job", "-o", job).stdout
        return line.split(f" {name}=")[1].split()[0]

    def wait(self, job: str) -> str:
        """Wait until the job has ended; returns its last state."""
        self.until(lambda: self.state(job) in ENDED, job)
        return self.state(job)

    def until(self, condition: Callable[[], bool], job: str) -> None:
        """Wait for a condition; fails with the job's log when the job has, or the time is over."""
        end = time.monotonic() + LIMIT_S
        state = self.state(job)  # read before the condition, which may wait for just this end
        while not condition():
            if state == "FAILED" or time.monotonic() > end:
                pytest.fail(f"job {job} is {state}:\n{self.log(job)}")
            time.sleep(0.3)
            state = self.state(job)

    def crash(self, node: str) -> None:
        """What a power cut would do: kill the node's daemon and all that runs there."""
        there = processes_with(f"SLURMD_NODENAME={node}")
        steps = {parent_of(pid) for pid in there} - set(there)  # slurmstepd, one for each step
        for pid in [self.daemon(node), *there, *(pid for pid in steps if "slurmstepd" in command_of(pid))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def kill_wait(self, seconds: int) -> None:
        """Set how long Slurm waits for processes that it has asked to end, and for those of nodes that crashed."""
        file = Path(self.environment["SLURM_CONF"])
        file.write_text(re.sub(r"KillWait=\d+", f"KillWait={seconds}", file.read_text()))
        self.call("scontrol", "reconfigure")

    def revive(self) -> None:
        """Start the nodes that crashed, and take back those that were set down."""
        for node in NODES:
            if "slurmd" not in command_of(self.daemon(node)):
                self.boot(node)
            self.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # fails if it is not down

    def boot(self, node: str) -> None:
        """Start the daemon of a node that crashed; slurm/local/down.sh will end it."""
        daemon = subprocess.Popen(
            ["slurmd", "-D", "-N", node], env=self.environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        text = self.pids.read_text().replace(f"slurmd-{node} {self.daemon(node)}\n", f"slurmd-{node} {daemon.pid}\n")
        self.pids.write_text(text)

    def daemon(self, node: str) -> int:
        """The process of the node's slurmd."""
        return int(dict(line.split() for line in self.pids.read_text().splitlines())[f"slurmd-{node}"])

    @property
    def pids(self) -> Path:
        """Where slurm/local/up.sh notes its daemons."""
        return Path(self.environment["STATE"]) / "pids"

    def log(self, job: str) -> str:
        """What the job has written so far."""
        file = self.logs / f"{job}.log"
        return file.read_text() if file.exists() else ""


def processes_with(variable: str) -> list[int]:
    """Processes that have this NAME=value in their environment."""
    files = Path("/proc").glob("[0-9]*/environ")
    return [int(file.parent.name) for file in files if variable in environment_of(file)]


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def environment_of(file: Path) -> list[str]:
    """NAME=value of a process, from its /proc/PID/environ; empty if it is gone."""
    return _read(file).split("\0")


def parent_of(pid: int) -> int:
    """Its parent's id; 0 if it is gone."""
    return next((int(line.split()[1]) for line in _read(Path(f"/proc/{pid}/status")).splitlines() if "PPid" in line), 0)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def slurm(local_slurm: Slurm) -> Iterator[Slurm]:
    """The local Slurm; the next test finds all nodes as they were and no jobs, even if this one fails."""
    yield local_slurm
    for state in ("PENDING", "RUNNING"):
        local_slurm.call("scancel", f"--state={state}", f"--user={os.getuid()}")
    local_slurm.revive()


@pytest.fixture(scope="package")
def local_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The local Slurm. One that does not start is a failure; where it cannot be installed, tests are skipped."""
    if os.getuid() or not (shutil.which("apt-get") or shutil.which("slurmctld")):
        pytest.skip("slurm/local/up.sh needs root, and apt-get where Slurm is not installed")
    logs = tmp_path_factory.mktemp("slurm_logs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    # Two test runs on one machine would meet in the daemons' ports: up.sh refuses the second one.
    environment |= {
        "STATE": "/run/slurm-tests",
        "NODES": str(len(NODES)),
        "CPUS": "128",
        "GPUS": "8",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"VENV": str(Path(os.environ.get("VIRTUAL_ENV", ROOT / ".venv")))}
    # What a session left that was killed.
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "timeout": LIMIT_S}
    subprocess.run(["slurm/local/down.sh"], **options, check=False)
    # With more of the cores than others: these tests run one after the other, beside all others.
    up = subprocess.run(["nice", "-n", "-5", "slurm/local/up.sh"], **options, text=True, check=False)
    if up.returncode:
        pytest.fail(f"slurm/local/up.sh: {up.stdout}{up.stderr}")
    environment["SLURM_CONF"] = up.stdout.strip().splitlines()[-1].removeprefix("export SLURM_CONF=")
    yield Slurm(environment, logs)
    subprocess.run(["slurm/local/down.sh"], **options, check=True)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a program in the path that answers this to every call; raw: that is this script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name: str, answer: str, fails: bool = False, raw: bool = False) -> None:
        says = f"cat <<'END'\n{answer}\nEND\n" if answer else ""
        (folder / name).write_text(answer if raw else f"#!/bin/sh\n{says}exit {int(fails)}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def calls(tmp_path: Path, program, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a Slurm that has nothing to do notes the arguments of each sbatch."""
    program("squeue", "")
    for name in ("sacct", "scontrol"):
        program(name, "", fails=True)
    program("sbatch", SBATCH, raw=True)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSE", "")
    return tmp_path / "calls"
