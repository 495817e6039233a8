"""What a job does on its first node: start one run everywhere, save before the time is over, requeue itself.

python -m slurm.job TASK [overrides ...]         one run; slurm/train.sbatch starts this
python -m slurm.job --cells FILE                 an array's element: line SLURM_ARRAY_TASK_ID (from 0) of FILE, which is
                                                 a JSON list [TASK, overrides ...]

Exit codes: 0 finished; 1 failed; 2 bad configuration; 75 interrupted after saving and not requeued.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

FINISHED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 75
CPU_COUNTS = r"(\d+)(?:\(x\d+\))?"  # such as 64(x3),32
REMIND_S = 5.0  # a worker that is just starting does not hear the first warning
STARTS_WITHOUT_PROGRESS = 2
STARTS = "starts.jsonl"


class JobError(RuntimeError):
    """The job cannot go on; the message says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave this job.

    ranks_per_node: one for each GPU of a node; without GPUs sbatch's --ntasks-per-node
    cpus_per_node:  the smallest number of any node
    """

    job: str
    nodes: int
    first_node: str
    ranks_per_node: int
    cpus_per_node: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Allocation":
        """From the variables that Slurm sets; JobError if this is not a job."""
        if "SLURM_JOB_ID" not in environment:
            raise JobError("not inside a Slurm job: sbatch slurm/train.sbatch TASK [overrides ...]", BAD_CONFIGURATION)
        tasks = environment["SLURM_TASKS_PER_NODE"].split("(")[0]  # such as 2(x4)
        return cls(
            job=environment["SLURM_JOB_ID"],
            nodes=int(environment["SLURM_JOB_NUM_NODES"]),
            first_node=environment["SLURMD_NODENAME"],  # where the batch script runs
            ranks_per_node=int(environment.get("SLURM_GPUS_ON_NODE") or 0) or int(tasks),
            cpus_per_node=min(map(int, re.findall(CPU_COUNTS, environment["SLURM_JOB_CPUS_PER_NODE"]))),
        )


def main(argv: Sequence[str]) -> int:
    """Runs the job; returns its exit code."""
    try:
        task, *overrides = cell(argv[1]) if argv[:1] == ["--cells"] else argv or [""]
        if not (Path(task) / "train.py").is_file():
            raise JobError(f"TASK={task!r}: expected cnn, transformer or gpt2, then overrides", BAD_CONFIGURATION)
        allocation = Allocation.read(os.environ)
        run_dir = run_dir_of(task, overrides)
        log = run_dir / "slurm" / f"{allocation.job}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            return Attempt(allocation, task, overrides, run_dir, file).run()
    except JobError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code


def cell(file: str) -> list[str]:
    """This array element's task and overrides."""
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    return json.loads(Path(file).read_text().splitlines()[number])


def run_dir_of(task: str, overrides: Sequence[str]) -> Path:
    """Where the run will write; JobError if the configuration cannot be composed."""
    command = [sys.executable, "-m", f"{task}.train", *overrides, "--cfg", "job", "--resolve", "--package", "run_dir"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobError(done.stderr.strip().removeprefix("error: "), BAD_CONFIGURATION)
    return Path(done.stdout.strip())


def training_command(allocation: Allocation, task: str, overrides: Sequence[str], restarts: str) -> list[str]:
    """One torchrun on each node, `ranks_per_node` workers each."""
    nodes = str(allocation.nodes)
    resume = [] if any(text.startswith("resume=") for text in overrides) else ["resume=true"]
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus_per_node}",
        "--kill-on-bad-exit=1",
        *shlex.split(os.environ.get("SRUN_OPTIONS", "")),
        "slurm/node.sh",
        f"--nnodes={nodes}",
        f"--nproc-per-node={allocation.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={allocation.job}.{restarts}",
        "-m",
        "slurm.rank",
        task,
        *overrides,
        *resume,
    ]


def newest_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(f.parent.name[5:]) for f in run_dir.glob("checkpoints/step_*/manifest.json")), default=0)


def last_job(run_dir: Path) -> str | None:
    """The id of the job that started this run last; None if there was none."""
    file = run_dir / "slurm" / STARTS
    return json.loads(file.read_text().splitlines()[-1])["job"] if file.exists() else None


def read_status(run_dir: Path) -> str | None:
    """The run's status in summary.json; None if there is none."""
    try:
        return json.loads((run_dir / "summary.json").read_text()).get("status")
    except (OSError, ValueError):
        return None


class Attempt:
    """One start of the job: Slurm starts it again after each requeue."""

    def __init__(
        self, allocation: Allocation, task: str, overrides: Sequence[str], run_dir: Path, log: IO[bytes]
    ) -> None:
        self._allocation, self._task, self._overrides = allocation, task, overrides
        self._run_dir, self._log = run_dir, log
        self._restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        self._warned = self._stopped = False
        self._steps: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train until the run is finished, the time is nearly over, or it fails."""
        signal.signal(signal.SIGUSR1, self._warn)  # --signal: the time limit is near
        signal.signal(signal.SIGTERM, self._stop)  # scancel, or Slurm is about to requeue the job itself
        if read_status(self._run_dir) != "finished":
            self._check_alone()
            self._check_progress()
        self._tell(f"job {self._allocation.job}, start {int(self._restarts) + 1}, at step {newest_step(self._run_dir)}")
        code = self._train()
        if code == 0 and read_status(self._run_dir) == "finished":
            return FINISHED
        if self._stopped:
            self._tell(
                f"stopped at step {newest_step(self._run_dir)}; after preemption or the failure of a node Slurm starts "
                "the job again, otherwise the same sbatch command continues"
            )
            return INTERRUPTED
        if code:
            self._tell(
                f"failed: srun ended with exit code {code}, the reason is above; if it is the failure of a node, Slurm "
                "starts the job again"
            )
            return FAILED
        return self._requeue()  # all ranks saved: the time is nearly over, or a partition's GraceTime began

    def _check_alone(self) -> None:
        """JobError if the job that started this run last still works on it: two would spoil each other's files."""
        job = last_job(self._run_dir)
        while job not in (None, self._allocation.job):
            state = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True).stdout
            if state.strip() in ("RUNNING", "SUSPENDED"):
                raise JobError(f"run_dir={self._run_dir}: job {job} is training it now", BAD_CONFIGURATION)
            if state.strip() != "COMPLETING":
                return
            self._tell(f"waiting for job {job}, which is ending")  # bounded by Slurm: it kills what does not end
            time.sleep(REMIND_S)

    def _check_progress(self) -> None:
        """Note this start; JobError if the last ones of this job began at the same step: it gets nowhere."""
        file = self._run_dir / "slurm" / STARTS
        earlier = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        step = newest_step(self._run_dir)
        last = [start["step"] for start in earlier if start["job"] == self._allocation.job][-STARTS_WITHOUT_PROGRESS:]
        if len(last) == STARTS_WITHOUT_PROGRESS and set(last) == {step}:
            message = (
                f"job {self._allocation.job} began {len(last)} times at step {step} and got no further: it stops; "
                "the same sbatch command tries again"
            )
            self._tell(message)
            raise JobError(message, FAILED)
        with file.open("a") as starts:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            nodes = os.environ["SLURM_JOB_NODELIST"]
            starts.write(json.dumps({"job": self._allocation.job, "step": step, "time": now, "nodes": nodes}) + "\n")

    def _train(self) -> int:
        allocation = self._allocation
        environment = os.environ | {
            "FIRST_NODE": allocation.first_node,
            "RENDEZVOUS_PORT": str(20000 + int(allocation.job) % 20000),
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, allocation.cpus_per_node // allocation.ranks_per_node)))
        command = training_command(allocation, self._task, self._overrides, self._restarts)
        self._tell(shlex.join(command))
        self._steps = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        copier = threading.Thread(target=self._copy, args=(self._steps.stdout,))
        copier.start()
        while True:
            try:
                code = self._steps.wait(REMIND_S)
                break
            except subprocess.TimeoutExpired:
                self._pass_on()
        copier.join()
        return code

    def _copy(self, output: Iterable[bytes]) -> None:
        """To the job's log and to the run's."""
        for line in output:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._log.write(line)

    def _tell(self, message: str) -> None:
        line = f"[slurm] {message}\n".encode()
        self._copy([line])

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self._warned = True
        self._pass_on()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True  # Slurm tells the workers

    def _pass_on(self) -> None:
        """srun sends the warning to slurm/node.sh on every node, and that to its workers: they save and stop."""
        if (self._warned or self._stopped) and self._steps is not None:
            self._steps.send_signal(signal.SIGUSR1)

    def _requeue(self) -> int:
        self._tell(f"saved at step {newest_step(self._run_dir)}; back to the queue")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how Slurm ends this start; else it waits for KillWait
        done = subprocess.run(["scontrol", "requeue", self._allocation.job], capture_output=True, text=True)
        if done.returncode:
            self._tell(f"cannot be requeued ({done.stderr.strip()}); the same sbatch command continues")
            return INTERRUPTED
        time.sleep(60)  # Slurm ends this start
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
