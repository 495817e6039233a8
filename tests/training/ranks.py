"""Runs of the cnn task whose processes a test starts, signals and kills one by one, as a cluster does."""

import multiprocessing
import os
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.distributed.processes import PRELOAD
from tests.ports import free_port


class Ranks:
    """One start of a run: `n` processes with the environment that torchrun gives them, forked from a warm server.

    late_s: how much later than rank 0 the others begin
    """

    def __init__(self, arguments: list[str], n: int, log: Path, late_s: float = 0.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self.processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(arguments, rank, n, port, log, late_s), daemon=True)
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> bool:
        """Return whether all processes end within `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    def signal(self, number: int, ranks: range | None = None) -> None:
        """Send a signal to all processes, or to some."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid or 0, number)

    def codes(self) -> list[int | None]:
        """Return the exit codes."""
        return [process.exitcode for process in self.processes]


def _rank(arguments: list[str], rank: int, n: int, port: int, log: Path, late_s: float) -> None:
    if rank > 0:
        time.sleep(late_s)
    from common.launch.processes import launch

    descriptor = os.open(log.with_name(f"{log.name}.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if n > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    sys.exit(launch("cnn", arguments))
