"""Processes of the checks: one for each check, those of its ranks, and programs. None outlives its time.

They are forked from a server that has imported everything but has never touched a GPU.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from scripts.gpu_check.outcome import FailedError, Machine, SkippedError

Result = TypeVar("Result")
PRELOAD = ["torch", "torch._dynamo", "common.parallel", "common.simulate", "common.training.launch", "cnn.task"]
END_S = 10.0  # that processes get to end after they were asked to, or after another rank failed
GROUP_TIMEOUT_S = 60.0
LAST_LINES = 15  # of a program's output that a failure shows


def run_check(function: Callable[[Machine], str], machine: Machine, timeout_s: float) -> tuple[str, str]:
    """Run a check in a new process; return ("passed" or "failed" or "skipped", its figure, the failure or the reason).

    A check that raises, dies or outlasts its time has failed, and the others go on.
    """
    process, receiver = _start(_check, function, machine, daemon=False)
    try:
        if not receiver.poll(timeout_s):
            return "failed", f"no result after {timeout_s:g} s"
        outcome = pickle.loads(receiver.recv_bytes())
        process.join(END_S)
        return outcome
    except EOFError:
        process.join(END_S)
        return "failed", f"its process ended with exit code {process.exitcode}"
    finally:
        _end(process)


def run_ranks(
    function: Callable[..., Result], n: int, machine: Machine, *args: object, timeout_s: float = 300.0
) -> list[Result]:
    """Call `function(rank, n, machine, *args)` in n processes with a process group; return the results by rank.

    With NCCL on GPUs, gloo on CPUs. A machine with one GPU lets the ranks share it: each is told that it lives on a
    host by itself, and messages travel through sockets.

    Raises FailedError with the first rank's error if one raises or dies, or if they outlast `timeout_s` together.
    """
    outcomes: list[tuple[bool, Any]] = [(False, "no answer in time")] * n
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(_rank, folder, machine, function, rank, n, args) for rank in range(n)]
        pending = {receiver: rank for rank, (_, receiver) in enumerate(started)}
        first_failure, deadline = None, time.monotonic() + timeout_s
        try:
            while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
                for receiver in ready:
                    rank = pending.pop(receiver)
                    try:
                        outcomes[rank] = pickle.loads(receiver.recv_bytes())
                    except EOFError:
                        outcomes[rank] = False, "the process died"
                    if not outcomes[rank][0] and first_failure is None:
                        first_failure, deadline = rank, min(deadline, time.monotonic() + END_S)
        finally:
            for process, _ in started:
                process.join(0.0 if pending else END_S)
                _end(process)
    failed = [rank for rank, (ok, _) in enumerate(outcomes) if not ok]
    if failed:
        rank = failed[0] if first_failure is None else first_failure
        print(outcomes[rank][1], file=sys.stderr, flush=True)
        raise FailedError(f"rank {rank} of {n}: {last_line(outcomes[rank][1])}")
    return [result for _, result in outcomes]


def run_program(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a program and return its exit code and output, which also goes to this process's own.

    Raises FailedError if it outlasts `timeout_s`; none of its processes stays.
    """
    with started_program(command, environment) as (process, log):
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise FailedError(f"{' '.join(command[:4])} ...: still running after {timeout_s:g} s") from None
        return code, log.read_text(errors="replace")


@contextlib.contextmanager
def started_program(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """Yield (process, file of its output) of a program in a new session; kill its processes at the end."""
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.getcwd()} | dict(environment or {}),
            start_new_session=True,
        )
        try:
            yield process, Path(log.name)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(Path(log.name).read_text(errors="replace"), flush=True)


def last_line(text: str) -> str:
    """Return the last line of a traceback that belongs to its error, which may have several."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and ": " in line]
    return (errors or lines or ["no message"])[-1].strip()


def tail(text: str) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def _start(target: Callable[..., None], *args: object, daemon: bool = True) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(sender, *args), daemon=daemon)
    process.start()
    sender.close()
    return process, receiver


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()  # a check then ends its ranks and programs
        process.join(END_S)
        process.kill()
    process.join()


def _check(sender: Connection, function: Callable[[Machine], str], machine: Machine) -> None:
    _write_to(machine.log)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        outcome = "passed", function(machine)
    except SkippedError as reason:
        outcome = "skipped", str(reason)
    except FailedError as failure:
        outcome = "failed", str(failure)
    except Exception as error:
        traceback.print_exc()
        outcome = "failed", f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sender.send_bytes(pickle.dumps(outcome))


def _rank(
    sender: Connection, folder: str, machine: Machine, function: Callable, rank: int, n: int, args: tuple
) -> None:
    _write_to(machine.log)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        open_group(f"{folder}/store", machine, rank, n)
        outcome = True, function(rank, n, machine, *args)
    except BaseException:
        outcome = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    sys.stdout.flush()
    if outcome[0] and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # nobody closes connections that a slower rank still uses
    os._exit(0)  # without destroying groups, which may wait for peers that died


def open_group(store: str, machine: Machine, rank: int, n: int) -> None:
    """Open the default process group of n ranks, which meet in the new file `store`, and take this rank's GPU."""
    if machine.shares_gpu:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_IB_DISABLE": "1"}
    if machine.on_gpu:
        torch.cuda.set_device(rank % machine.gpus)
    dist.init_process_group(
        "nccl" if machine.on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _write_to(log: str | None) -> None:
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
