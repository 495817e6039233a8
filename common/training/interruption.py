"""The decision to save and stop, taken by all processes in the same step."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.collectives import PeerError, explained, is_distributed
from common.training.signals import SIGNALS

EVERY = 10  # steps, at most: Slurm may send its warning only 30 s before the end
AGREE_S = 1.0  # from one agreement to the next, unless a step takes longer


class Request(IntEnum):
    """A request of a process; if processes differ, the largest wins."""

    NOTHING = 0
    CHANGE = 1  # continue with other workers
    STOP = 2  # save and end
    LEAVE = 3  # a peer is gone, no agreement is possible


class Interruption:
    """The decision to stop, the same on all processes. A context manager that restores the former signal handlers.

    A signal may reach only one process, or reach them in different steps, so they must agree. Every few steps they
    start a maximum over ranks and read the previous one: reading it at once would make all workers wait for the
    slowest, which gossip avoids. The maximum includes the step time, from which all compute how many steps take about
    AGREE_S on the slowest rank. If one step takes longer, each step is followed by an agreement: a run stops after two.

    every: steps from one agreement to the next, the same on all ranks; at most EVERY are used
    own:   called each time; returns another request of this process
    group: of all processes; None: the default group
    """

    heard = False  # whether this process has received a signal in any of these contexts

    def __init__(
        self,
        device: torch.device,
        every: int = EVERY,
        own: Callable[[], Request] = lambda: Request.NOTHING,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = device
        self._every = min(every, EVERY)
        self._due: int | None = None  # the step after which all agree; None: after the next one
        self._began = 0, time.perf_counter()  # step and time of the last agreement
        self._asked = Request.NOTHING
        self._own = own
        self._group = group
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The tensor being reduced, the result, how to wait for it.
        self._largest: tuple[Tensor, Tensor, Callable[[], object]] | None = None

    def __enter__(self) -> "Interruption":
        self._former = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:  # after an error other ranks may never take part
            self._agreed()

    @property
    def asked(self) -> bool:
        """Whether this process has received a signal."""
        return self._asked is not Request.NOTHING

    def requested(self, step: int) -> Request:
        """Return the largest request that any process had some steps ago. Collective; to be called after every step.

        Raises PeerError if this process requests to leave.
        """
        if not is_distributed():
            return self._asked
        if self._own() is Request.LEAVE:
            raise PeerError("a peer was lost")
        if self._due is not None and step < self._due:
            return Request.NOTHING
        agreed, step_s = self._agreed()
        self._start(step)
        steps = int(min(self._every, AGREE_S / step_s)) if step_s > 0 else 1
        self._due = step + max(1, steps)
        return agreed

    def reset(self) -> None:
        """Wait for the agreement in flight, or give it up if peers are gone; this process's own requests stay."""
        with suppress(PeerError):
            self._agreed()
        self._largest = self._due = None

    @explained("asking whether to stop")
    def _start(self, step: int) -> None:
        (before, then), now = self._began, time.perf_counter()
        self._began = step, now
        step_s = (now - then) / max(1, step - before) if self._due is not None else 0.0
        asked = torch.full((2,), step_s, device=self._device)
        asked[0] = float(max(self._asked, self._own()))
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, self._group, async_op=True)
        self._largest = asked, *((asked, work.wait) if self._side is None else self._copied(asked, work, self._side))

    @staticmethod
    def _copied(asked: Tensor, work: dist.Work, side: torch.cuda.Stream) -> tuple[Tensor, Callable[[], object]]:
        """Copy the answer to the host on a side stream: reading it on the training stream waits for all its work."""
        with torch.cuda.stream(side):
            work.wait()
            answer = torch.empty(2, pin_memory=True).copy_(asked, non_blocking=True)
            return answer, side.record_event().synchronize

    @explained("asking whether to stop")
    def _agreed(self) -> tuple[Request, float]:
        """Return the last agreement: the largest request, and the longest time of a step in s, 0 if unknown."""
        if self._largest is None:
            return Request.NOTHING, 0.0
        _, answer, wait = self._largest
        wait()
        self._largest = None
        request, step_s = answer.tolist()
        return Request(int(request)), step_s

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = Request.STOP
        Interruption.heard = True
