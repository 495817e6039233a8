"""The device of a test, and the ranks that it may start there."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import run_processes
from tests.gpu.groups import register_staged
from tests.waiting import processes_in, wait_for

RANKS = 4  # on CPUs, and where they share the only GPU
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
# Where a test runs, for the fixture `device`: on GPUs with `-m gpu`, in a reduced form on CPUs in one of the tiers.
on_gpu = pytest.mark.parametrize("device", [CUDA], indirect=True)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
on_slow_cpu_too = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA], indirect=True)


@dataclass(frozen=True)
class Device:
    """name: "cpu" or "cuda"; gpus: how many there are."""

    name: str
    gpus: int = 0

    @property
    def ranks(self) -> int:
        """The most ranks that a test may start, a power of two."""
        return RANKS if self.gpus < 2 else 1 << (self.gpus.bit_length() - 1)

    @property
    def on_gpu(self) -> bool:
        return self.name == "cuda"

    def require_gpus(self, count: int) -> None:
        if self.on_gpu and self.gpus < count:
            pytest.skip(f"needs {count} GPUs, found {self.gpus}")

    def settle(self) -> None:
        """Wait until the GPU, if there is one, has done its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    @property
    def backend(self) -> str:
        """What carries messages among ranks."""
        return "gloo" if not self.on_gpu else "nccl" if self.gpus > 1 or nccl_shares_a_gpu() else "staged"

    @property
    def carriers(self) -> str:
        """What a record says of the messages."""
        shared = ", ranks share a GPU" if self.gpus == 1 else ""
        return f"messages by {self.backend.replace('staged', 'gloo through the host')}{shared}"

    def run(self, function: Callable[..., Any], n: int, *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call `function(rank, n, device, *args)` in n processes and return the results by rank."""
        return run_processes(function, n, self, *args, timeout=timeout, backend=self.backend)


@functools.cache
def nccl_shares_a_gpu() -> bool:
    """Return whether NCCL lets ranks share a GPU that are told to live on hosts of their own."""
    try:
        run_processes(_sum, 2, timeout=90, backend="nccl")
    except AssertionError as error:
        print(error)
        return False
    return True


def program(*arguments: str, limit_s: float, **environment: str) -> tuple[int, str]:
    """Return the exit code and the output of `python -m ARGUMENTS`. None of its processes may live on."""
    known = os.environ | {"PYTHONPATH": os.getcwd(), "GPU_RECORD": ""} | environment
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=known, start_new_session=True)
        try:
            code = process.wait(limit_s)
            wait_for(lambda: not processes_in(process.pid), limit_s=30.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return code, log.read()


def take_gpu(rank: int) -> None:
    """Prepare this process for its process group."""
    register_staged()
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(rank % gpus)
        if gpus == 1:
            os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_IB_DISABLE": "1"}


def _sum(rank: int, n: int) -> None:
    total = torch.ones((), device="cuda")
    dist.all_reduce(total)
    assert total.item() == n
