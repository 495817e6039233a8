"""What Slurm gave this job, and the commands that use it.

python -m slurm.allocation MODULE [key=value ...]        run a module on every rank; table1.sbatch and figure6.sbatch
                                                         start benchmarks this way
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.record import BAD_CONFIGURATION

COUNTS = r"(\d+)(?:\(x\d+\))?"  # such as 64(x3),32
ANSWER_S = 30
# srun would read sbatch's options from these, which contradict one task per node with all of the node's resources.
NOT_FOR_SRUN = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_EXPORT_ENV",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_HINT",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
)


class JobError(RuntimeError):
    """The job cannot go on; the message says why, `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Allocation:
    """The part of a job's environment that matters here.

    node_list:      as Slurm writes it, such as node[1-4]
    gpus_per_node:  0 without GPUs
    ranks_per_node: one for each GPU of a node; without GPUs, the tasks per node that sbatch was asked for, or 1
    cpus_per_node:  the smallest number of any node
    """

    job: str
    nodes: int
    node_list: str
    first_node: str
    gpus_per_node: int
    ranks_per_node: int
    cpus_per_node: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Allocation":
        """Read the variables that Slurm sets; raise JobError if this is not a job, or if its nodes are not alike."""
        if not {"SLURM_JOB_ID", "SLURMD_NODENAME"} <= environment.keys():  # salloc sets only the former
            raise JobError("not inside a Slurm job: sbatch slurm/train.sbatch TASK [overrides ...]", BAD_CONFIGURATION)
        try:
            shlex.split(environment.get("SRUN_OPTIONS", ""))
        except ValueError as error:
            raise JobError(f"SRUN_OPTIONS={environment['SRUN_OPTIONS']}: {error}", BAD_CONFIGURATION) from None
        job = environment["SLURM_JOB_ID"]
        if not job.isdecimal() or int(environment.get("SLURM_HET_SIZE") or 1) > 1:
            raise JobError(f"job {job} is heterogeneous: expected one component, all of equal nodes", BAD_CONFIGURATION)
        nodes, gpus = int(environment["SLURM_JOB_NUM_NODES"]), int(environment.get("SLURM_GPUS_ON_NODE") or 0)
        asked = environment.get("SLURM_GPUS", "").split(":")[-1]  # only with sbatch --gpus, such as a40:6
        if asked.isdecimal() and int(asked) != nodes * gpus:
            raise JobError(
                f"--gpus={asked} on {nodes} nodes, {gpus} on the first: expected equal nodes (--gpus-per-node)",
                BAD_CONFIGURATION,
            )
        # If no tasks were asked for, Slurm fills the nodes with them: one for each CPU.
        wanted = "SLURM_NTASKS" in environment or "SLURM_NTASKS_PER_NODE" in environment
        counts = _counts(environment["SLURM_TASKS_PER_NODE"]) if wanted else {1}
        if not gpus and len(counts) > 1:
            tasks = environment["SLURM_TASKS_PER_NODE"]
            raise JobError(f"tasks on the nodes: {tasks}; expected equal nodes (--ntasks-per-node)", BAD_CONFIGURATION)
        return cls(
            job=job,
            nodes=nodes,
            node_list=environment["SLURM_JOB_NODELIST"],
            first_node=environment["SLURMD_NODENAME"],  # where the batch script runs
            gpus_per_node=gpus,
            ranks_per_node=gpus or counts.pop(),
            cpus_per_node=min(_counts(environment["SLURM_JOB_CPUS_PER_NODE"])),
        )

    @property
    def threads(self) -> int:
        """CPU threads of each rank: OMP_NUM_THREADS if it is set, or a node's CPUs divided by its ranks."""
        wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return (int(wanted) if wanted.isdecimal() else 0) or max(1, self.cpus_per_node // self.ranks_per_node)

    @property
    def _on_each_node(self) -> list[str]:
        return ["srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--export=ALL"]

    def torchrun(self, module: str, arguments: Sequence[str], attempt: str = "0") -> list[str]:
        """Return the command that runs a module under one torchrun on each node, `ranks_per_node` ranks each."""
        return [
            *self._srun("--kill-on-bad-exit=1"),
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks_per_node}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.job}.{attempt}",
            "-m",
            "slurm.rank",
            module,
            *arguments,
        ]

    def agents(self, module: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs a module once on each node; the other nodes go on when one is lost."""
        return [*self._srun("--no-kill", "--kill-on-bad-exit=0", "--wait=0"), "--elastic", module, *arguments]

    def _srun(self, *options: str) -> list[str]:
        return [
            *self._on_each_node,
            f"--cpus-per-task={self.cpus_per_node}",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *options,
            *shlex.split(os.environ.get("SRUN_OPTIONS", "")),
            "slurm/node.sh",
        ]

    def environment(self) -> dict[str, str]:
        """Return the variables for these commands: slurm/node.sh may run in a container, where it cannot ask Slurm."""
        addresses = self.addresses()
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "RENDEZVOUS_PORT": str(20000 + int(self.job) % 10000),  # below the ephemeral ports
            **_for_srun(),
            "FIRST_NODE": self.first_node,
            "NODE_ADDRESSES": " ".join(f"{name}={address}" for name, address in addresses.items()),
            "PYTHONUNBUFFERED": "1",
        }

    def addresses(self) -> dict[str, str]:
        """Return {node: address}, as far as Slurm knows them."""
        done = answer("scontrol", "show", "node", "-o", self.node_list)
        return dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", done.stdout)) if done else {}

    def nodes_answer(self) -> bool:
        """Return whether all nodes can run a command now."""
        done = answer(*self._on_each_node, "--overlap", "--cpus-per-task=1", "true", environment=_for_srun())
        return done is not None and done.returncode == 0


def _for_srun() -> dict[str, str]:
    """Return the variables of this process, without those that srun would read options from."""
    return {name: value for name, value in os.environ.items() if name not in NOT_FOR_SRUN}


def _counts(numbers: str) -> set[int]:
    return set(map(int, re.findall(COUNTS, numbers)))


def slurmd_timeout_s() -> int:
    """Return after how many seconds without an answer Slurm considers a node dead."""
    done = answer("scontrol", "show", "config")
    match = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", done.stdout, re.MULTILINE) if done else None
    return int(match[1]) if match else 300


def answer(*command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str] | None:
    """Run a Slurm command; return None if it does not answer."""
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def main(argv: Sequence[str]) -> int:
    """Run the module on every rank; return srun's exit code, 2 if the nodes do not fit."""
    module, *arguments = argv
    try:
        allocation = Allocation.read(os.environ)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    command = allocation.torchrun(module, arguments)
    print(shlex.join(command), flush=True)
    return subprocess.run(command, env=allocation.environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
