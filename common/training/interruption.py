"""Signals that ask a run to save and stop: SIGTERM, SIGINT and SIGUSR1 (Slurm's warning before the time limit)."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.collectives import explained, is_distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EVERY = 10  # steps, at most: Slurm may send its warning only 30 s before the end


class Interruption:
    """The decision to stop, the same on all processes. A context manager, which restores former signal handlers.

    A signal may reach one process only, or reach them in different steps, so they must agree. Every few steps they
    start a sum over ranks and read the previous one: reading it at once would make all workers wait for the slowest,
    which gossip avoids.

    every: steps from one agreement to the next, the same on all ranks; at most EVERY are used
    """

    def __init__(self, device: torch.device, every: int = EVERY) -> None:
        self._device = device
        self._every = min(every, EVERY)
        self._asked = False
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sum: tuple[Tensor, Tensor, Callable[[], object]] | None = None  # what is summed, the result, how to wait
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:  # after an error others may not come, and nobody waits for them
            self._agreed()

    def requested(self, step: int) -> bool:
        """Return whether any process was asked to stop some steps ago. Collective, after every step."""
        if not is_distributed():
            return self._asked
        if step % self._every:
            return False
        stop = self._agreed()
        asked = torch.full((), float(self._asked), device=self._device)
        work = dist.all_reduce(asked, async_op=True)
        self._sum = asked, *((asked, work.wait) if self._side is None else self._copied(asked, work, self._side))
        return stop

    @staticmethod
    def _copied(asked: Tensor, work: dist.Work, side: torch.cuda.Stream) -> tuple[Tensor, Callable[[], object]]:
        """Copy the sum to the host beside the stream that trains, for all of whose work reading it would wait."""
        with torch.cuda.stream(side):
            work.wait()
            answer = torch.empty((), pin_memory=True).copy_(asked, non_blocking=True)
            return answer, side.record_event().synchronize

    @explained("asking whether to stop")
    def _agreed(self) -> bool:
        """Return the result of the last sum; False without one."""
        if self._sum is None:
            return False
        _, answer, wait = self._sum
        wait()
        self._sum = None
        return bool(answer > 0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
