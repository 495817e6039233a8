"""The worker processes of a host, numbered by their ranks when the run began."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import Any

from common.elastic.membership import Membership, Notice, Report
from common.elastic.wire import Ended, Hello

Start = Callable[[int, Connection], BaseProcess]
Event = tuple[int, Hello | Report | Ended]


class StoppedError(Exception):
    """A signal came before there was anything to save."""


class LocalHost:
    """Workers of this host.

    start: creates a worker's process, given its number and its end of a pipe
    """

    leaving = False  # it was asked to stop: no workers are started here any more

    def __init__(self, start: Start) -> None:
        self._start = start
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}

    @property
    def running(self) -> set[int]:
        """Numbers of the processes whose exit was not reported."""
        return set(self._processes)

    def start(self, number: int) -> None:
        """Start a process."""
        mine, theirs = Pipe()
        process = self._start(number, theirs)
        process.start()
        theirs.close()
        self._processes[number], self._connections[number] = process, mine

    def kill(self, number: int) -> None:
        """Kill a process; its exit is not reported."""
        process = self._processes.pop(number)
        process.kill()
        process.join()
        self._connections.pop(number, None)

    def send(self, number: int, message: Membership | Notice) -> None:
        """Send to a process."""
        with suppress(OSError, KeyError):  # it died; its exit is reported next
            self._connections[number].send(message)

    def handles(self) -> list[Any]:
        """Return the workers' pipes and sentinels."""
        return [*self._connections.values(), *(process.sentinel for process in self._processes.values())]

    def events(self, ready: Sequence[Any]) -> Iterator[Event]:
        """Yield reports, then ends."""
        for number, connection in list(self._connections.items()):
            if connection in ready and number in self._connections:  # not killed meanwhile
                try:
                    yield number, connection.recv()
                except (EOFError, OSError):  # it is about to end
                    del self._connections[number]
        for number, process in list(self._processes.items()):
            if process.sentinel in ready and number in self._processes:
                process.join()
                del self._processes[number]
                self._connections.pop(number, None)
                yield number, Ended(process.exitcode or 0)

    def signal(self, number: int) -> None:
        """Send a signal to all workers."""
        for process in self._processes.values():
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def disconnect(self) -> None:
        """Close the pipes: workers then save and stop."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def end(self) -> None:
        """Kill all workers and wait for their end."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()
        self._connections.clear()
