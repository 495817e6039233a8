"""What a training job does on its first node: start the run on all nodes, save before the time limit, requeue itself.

python -m slurm.job TASK [overrides ...]         one run; slurm/train.sbatch starts this
python -m slurm.job --cells FILE                 an array's element: line SLURM_ARRAY_TASK_ID (from 0) of FILE, which is
                                                 a JSON list [TASK, overrides ...]

Exit codes: 0 finished; 1 failed; 2 bad configuration; 75 interrupted after saving and not requeued.
"""

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import yaml

from common.record import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED, read_status
from slurm import starts
from slurm.allocation import Allocation, JobError, slurmd_timeout_s
from slurm.starts import newest_step

REMIND_S = 5.0  # a rank that is just starting misses the first warning


def main(argv: Sequence[str]) -> int:
    """Run the job; return its exit code."""
    try:
        task, *overrides = cell(*argv[1:2]) if argv[:1] == ["--cells"] else argv or [""]
        if not (Path(task) / "train.py").is_file():
            raise JobError(f"TASK={task!r}: expected cnn, transformer or gpt2, then overrides", BAD_CONFIGURATION)
        allocation = Allocation.read(os.environ)
        config = compose(task, overrides)
        try:
            check_count(config, allocation)
            run_dir = Path(config["run_dir"])
        except (KeyError, TypeError) as error:
            raise JobError(f"a value is missing or of another type: {error}", BAD_CONFIGURATION) from None
        log = run_dir / "slurm" / f"{allocation.job}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"run_dir={run_dir}: cannot be written ({error.strerror})", BAD_CONFIGURATION) from None
        with log.open("ab", buffering=0) as file:
            return Attempt(allocation, task, overrides, config, file).run()
    except JobError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code


def cell(file: str = "") -> list[str]:
    """Return the task and the overrides of this array element; raise JobError if the file does not hold them."""
    number = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    try:
        words = json.loads(Path(file).read_text().splitlines()[int(number)])
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError("expected [TASK, overrides ...]")
    except (OSError, ValueError, IndexError) as error:
        raise JobError(f"--cells {file}, SLURM_ARRAY_TASK_ID={number}: {error}", BAD_CONFIGURATION) from None
    return words


def compose(task: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the run's configuration before it is checked; raise JobError if it cannot be composed."""
    if flags := [word for word in overrides if word.startswith("-")]:
        raise JobError(f"{flags[0]}: expected overrides; flags are for python -m {task}.train", BAD_CONFIGURATION)
    command = [sys.executable, "-m", f"{task}.train", *overrides, "--cfg", "job", "--resolve"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobError(done.stderr.strip().removeprefix("error: "), BAD_CONFIGURATION)
    return yaml.safe_load(done.stdout)


def is_elastic(config: Mapping[str, Any]) -> bool:
    """Return whether the run goes on when workers die."""
    elastic = config["elastic"]
    return elastic if isinstance(elastic, bool) else elastic["min_workers"] is not None


def check_count(config: Mapping[str, Any], allocation: Allocation) -> None:
    """Raise JobError, once instead of on each rank, if the nodes do not have the ranks of the configured workers."""
    workers, per_worker = config["workers"], config["parallel"].get("ranks_per_worker") or 1
    elastic, nodes, per_node = is_elastic(config), allocation.nodes, allocation.ranks_per_node
    count, available = workers["count"], nodes * per_node // per_worker
    if workers["kind"] != "processes":
        return
    if elastic and per_node % per_worker:
        wrong = f"parallel.ranks_per_worker={per_worker}: expected a divisor of the {per_node} ranks of a node"
    elif elastic and (count or 0) > available and not newest_step(Path(config["run_dir"])):  # few may be left of a run
        wrong = f"workers.count={count}: expected at most {available}, what {nodes} nodes of {per_node} ranks hold"
    elif not elastic and count not in (None, available):
        started = f"the launcher started {nodes * per_node} processes"
        wrong = f"workers.count={count}: {started}, expected {available} or null"
    else:
        return
    raise JobError(wrong, BAD_CONFIGURATION)


def stamp(run_dir: Path) -> tuple[int, ...]:
    """Return a value that changes whenever summary.json is written; empty without one."""
    try:
        stat = (run_dir / "summary.json").stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class Attempt:
    """One start of the job: Slurm starts it again after each requeue."""

    def __init__(
        self, allocation: Allocation, task: str, overrides: Sequence[str], config: Mapping[str, Any], log: IO[bytes]
    ) -> None:
        self._allocation, self._task, self._overrides = allocation, task, overrides
        self._config, self._run_dir, self._log = config, Path(config["run_dir"]), log
        self._elastic = is_elastic(config)
        self._earlier = stamp(self._run_dir)
        self._restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        self._warned = self._stopped = self._node_failed = False
        self._steps: subprocess.Popen[bytes] | None = None
        self._start: Path | None = None

    def run(self) -> int:
        """Train until the run is finished, the time is nearly over, or it fails; return the exit code."""
        signal.signal(signal.SIGUSR1, self._warn)  # --signal: the time limit is near
        signal.signal(signal.SIGTERM, self._stop)  # scancel, or Slurm is about to requeue the job itself
        job, nodes = self._allocation.job, self._allocation.node_list
        if read_status(self._run_dir) != "finished":
            try:
                self._start = starts.begin(self._run_dir, job, nodes, self._tell)
            except JobError as error:
                self._tell(f"error: {error}")
                return error.code
        self._tell(f"job {job}, start {int(self._restarts) + 1}, at step {newest_step(self._run_dir)}")
        code = self._train()
        if code and not self._stopped and not self._elastic:
            self._wait_for_lost_nodes()
        end = self._end(code)
        self._record(end)
        return self._conclude(end, code)

    def _record(self, end: str) -> None:
        if self._start is not None:
            with contextlib.suppress(OSError):  # a full disk
                starts.end(self._start, end)

    def _end(self, code: int) -> str:
        """Return how this start ended, in the words of starts.Start."""
        status = read_status(self._run_dir)
        survived = self._elastic and stamp(self._run_dir) != self._earlier  # what this start wrote, whatever srun says
        if status == "finished" and (code == 0 or survived):
            return "finished"
        if survived and status == "interrupted" and not self._stopped:
            return "saved"  # too few nodes were left, or as below
        if self._node_failed:
            return "node failure"
        if self._stopped:
            return starts.STOPPED
        return "failed" if code else "saved"

    def _conclude(self, end: str, code: int) -> int:
        """Say how it ended; return the job's exit code."""
        match end:
            case "finished":
                return FINISHED
            case "saved":  # by all ranks: the time is nearly over, or a partition's GraceTime began
                return self._requeue()
            case "failed":
                self._tell(f"failed: srun ended with exit code {code}, the reason is above")
                return FAILED
        self._tell(
            f"{end} at step {newest_step(self._run_dir)}; after preemption or the failure of a node Slurm starts the "
            "job again, otherwise the same sbatch command continues"
        )
        return INTERRUPTED

    def _train(self) -> int:
        allocation = self._allocation
        defaults = {"training.threads": allocation.threads, "resume": "true"}
        if self._elastic:
            per_node = allocation.ranks_per_node // (self._config["parallel"].get("ranks_per_worker") or 1)
            count = self._config["workers"]["count"]
            defaults |= {"workers.count": count or allocation.nodes * per_node, "workers.per_host": per_node}
        given = {override.partition("=")[0] for override in self._overrides}
        added = [f"{key}={value}" for key, value in defaults.items() if key not in given]
        arguments = (f"{self._task}.train", [*self._overrides, *added])
        command = allocation.agents(*arguments) if self._elastic else allocation.torchrun(*arguments, self._restarts)
        environment = allocation.environment()
        if self._elastic:
            environment.setdefault("ELASTIC_SECRET", secrets.token_hex(16))
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
                if self._stopped:
                    self._record(starts.STOPPED)  # already now: Slurm may kill this process before the ranks have saved
        copier.join()
        return code

    def _wait_for_lost_nodes(self) -> None:
        """Wait while a node does not answer: once Slurm considers it dead, only a job that still runs is requeued.

        Peers and srun give up long before that. Returns at once if all nodes answer, as after an error in training.
        """
        limit, began = slurmd_timeout_s() + 30, time.monotonic()
        while not self._stopped and not self._allocation.nodes_answer() and time.monotonic() < began + limit:
            self._tell(f"a node does not answer; waiting at most {limit} s for Slurm to notice")
            time.sleep(REMIND_S)

    def _copy(self, output: Iterable[bytes]) -> None:
        """Write lines to the job's log and to the run's."""
        for line in output:
            self._node_failed |= b"node failure" in line.lower()  # srun says so
            for file in (sys.stdout.buffer, self._log):
                with contextlib.suppress(OSError):  # a full disk: srun must not wait for a reader forever
                    file.write(line)
                    file.flush()

    def _tell(self, message: str) -> None:
        line = f"[slurm] {message}\n".encode()
        self._copy([line])

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self._warned = True
        self._pass_on()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True  # Slurm tells the ranks

    def _pass_on(self) -> None:
        """Warn all ranks, through srun and slurm/node.sh on every node: they save and stop."""
        if (self._warned or self._stopped) and self._steps is not None:
            self._steps.send_signal(signal.SIGUSR1)

    def _requeue(self) -> int:
        self._tell(f"saved at step {newest_step(self._run_dir)}; back to the queue")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends this start with it, and else waits for KillWait
        done = subprocess.run(["scontrol", "requeue", self._allocation.job], capture_output=True, text=True)
        if done.returncode:
            self._tell(f"cannot be requeued ({done.stderr.strip()}); the same sbatch command continues")
            return INTERRUPTED
        time.sleep(60)  # Slurm ends this start
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
