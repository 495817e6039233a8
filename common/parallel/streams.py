"""Devices whose work is queued on streams (CUDA): the host runs ahead of them, and streams order what they do.

`wait()` blocks the stream, not the host, so host timers and timeouts miss it: `Watch` looks for messages that do not
arrive, `Stalls` measures how long a stream stood still.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch


def is_queued(device: torch.device) -> bool:
    """Return whether a call returns when its work on the device is queued, not when it is done."""
    return device.type == "cuda"


class Stalls:
    """Seconds that the current stream of a device waits inside `measured()` blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how long the stream waits in the block."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((begin, end))

    def passed(self) -> float:
        """Return the seconds waited in blocks that the device has passed since the last call; never block the host."""
        seconds = 0.0
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            seconds += begin.elapsed_time(end) / 1000
        return seconds


class Watch:
    """A thread that says which messages do not arrive in time; the process group's own timeout then ends the run.

    timeout: how long messages may be under way
    """

    def __init__(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._under_way: deque[tuple[float, Callable[[], bool], Callable[[], str]]] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, arrived: Callable[[], bool], sentence: Callable[[], str]) -> None:
        """Watch messages that were posted just now; they are looked at in the order in which they were added."""
        self._under_way.append((time.monotonic() + self._seconds, arrived, sentence))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gossip-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 10)):
            while self._under_way and self._under_way[0][1]():
                self._under_way.popleft()
            if self._under_way and time.monotonic() > self._under_way[0][0]:
                sys.stderr.write(f"{self._under_way[0][2]()}\n")  # one write: other ranks share it
                return
