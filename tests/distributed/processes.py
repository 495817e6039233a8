"""Real gloo processes for tests: forked from a warm server, each runs one function and returns its result."""

import contextlib
import multiprocessing
import multiprocessing.connection
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from cnn.task import TASK

# One server for the whole test session, whoever starts it: what any of its processes will import.
PRELOAD = ["torch", "torch._dynamo", "tests.distributed.warm", "pytest", "common.parallel", "common.optim"]
PRELOAD += ["common.simulate", "common.launch.processes", "cnn.task", *TASK.late_imports]
TIMEOUT_S = 600.0  # several times what the longest test takes where other tests keep all cores busy


def run_processes(
    function: Callable[..., Any], n: int, *args: Any, timeout: float = TIMEOUT_S, backend: str | None = "gloo"
) -> list[Any]:
    """Call `function(rank, n, *args)` in n processes with a gloo group; return the results in rank order.

    backend: as the user names it; None leaves it to PyTorch, which takes gloo on a CPU and then calls it "undefined";
    "nccl" gives each rank a GPU, see `tests.gpu.device`

    Fail with every traceback if any process raises, dies or outlasts `timeout` seconds. No process survives.
    """
    outcomes = collect(function, n, args, timeout, backend)
    failures = [f"--- rank {rank} ---\n{result}" for rank, (ok, result) in enumerate(outcomes) if not ok]
    assert not failures, "\n".join(failures)
    return [result for _, result in outcomes]


def collect(
    function: Callable[..., Any], n: int, args: tuple, timeout: float = TIMEOUT_S, backend: str | None = "gloo"
) -> list[tuple[bool, Any]]:
    """Do as `run_processes`, but return (ok, result or traceback text) for each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    outcomes: list[tuple[bool, Any]] = [(False, "no answer (died or timed out)")] * n
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], {}
        for rank in range(n):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_main, args=(sender, folder, backend, function, rank, n, args), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes[receiver] = rank
        deadline = time.monotonic() + timeout
        try:
            while pipes and (ready := multiprocessing.connection.wait(list(pipes), deadline - time.monotonic())):
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        outcomes[rank] = (False, "the process died without an answer")
        finally:
            for process in processes:
                process.join(5 if not pipes else 0)
                process.kill()
                process.join()
    return outcomes


def _main(sender: Any, folder: str, backend: str | None, function: Callable, rank: int, n: int, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend in ("nccl", "staged"):
            from tests.gpu.device import take_gpu

            take_gpu(rank)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=timedelta(seconds=60)
        )
        outcome = (True, function(rank, n, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    sys.stdout.flush()
    if outcome[0]:
        with contextlib.suppress(RuntimeError):  # a peer may have died on purpose
            dist.barrier()  # nobody closes connections that a slower rank still uses
        dist.destroy_process_group()
