"""Worker processes on a host, this one or another, as the agent sees them.

Hosts are told what to do and tell what happens, see `common.training.wire`.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol

from common.training.exits import INTERRUPTED
from common.training.interruption import SIGNALS
from common.training.membership import Membership, Report, Word
from common.training.wire import RETRY_S, Command, Ended, Hello, connect, receive, send

ENTRY_S = 120.0  # how long to look for the agent at least: it answers when it has imported everything


class RefusedError(RuntimeError):
    """The agent does not take this host."""


Start = Callable[[int, Connection], BaseProcess]
Event = tuple[int, Hello | Report | Ended]


class Host(Protocol):
    """A host that runs worker processes, numbered by their ranks when the run began. running: their numbers."""

    running: set[int]

    def start(self, number: int) -> None:
        """Start a process."""

    def kill(self, number: int) -> None:
        """Kill a process, about which nothing is told any more."""

    def send(self, number: int, message: Membership | Word) -> None:
        """Send to a process."""

    def handles(self) -> list[Any]:
        """Return what to wait for with `multiprocessing.connection.wait`."""

    def events(self, ready: Sequence[Any]) -> Iterator[Event]:
        """Yield what happened, given the handles that are ready."""


class LocalHost:
    """Workers of this host.

    start: creates a worker's process, given its number and its end of a pipe
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}

    @property
    def running(self) -> set[int]:
        """Numbers of the workers whose end has not been told."""
        return set(self._processes)

    def start(self, number: int) -> None:
        """Start a process."""
        mine, theirs = Pipe()
        process = self._start(number, theirs)
        process.start()
        theirs.close()
        self._processes[number], self._connections[number] = process, mine

    def kill(self, number: int) -> None:
        """Kill a process, about which nothing is told any more."""
        process = self._processes.pop(number)
        process.kill()
        process.join()
        self._connections.pop(number, None)

    def send(self, number: int, message: Membership | Word) -> None:
        """Send to a process."""
        with suppress(OSError, KeyError):  # it died; that comes next
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

    def leave(self) -> None:
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


class RemoteHost:
    """Workers of another host, at the agent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.running: set[int] = set()
        self.name: str | None = None  # until it has said who it is
        self.gone = False
        self._dying: Counter[int] = Counter()  # killed workers whose end the host has not told

    def start(self, number: int) -> None:
        """Start a process."""
        self.running.add(number)
        self._send(number, Command.START)

    def kill(self, number: int) -> None:
        """Kill a process, about which nothing is told any more: the host may not answer either."""
        self.running.discard(number)
        self._dying[number] += 1
        self._send(number, Command.KILL)

    def send(self, number: int, message: Membership | Word) -> None:
        """Send to a process."""
        self._send(number, message)

    def welcome(self) -> None:
        """Take the host."""
        self._send(-1, Command.WELCOME)

    def finish(self, code: int) -> None:
        """Tell the host how the run has ended, and let it go."""
        self._send(-1, Ended(code))
        self.gone = True
        self._connection.close()

    def handles(self) -> list[Any]:
        """Return the connection."""
        return [] if self.gone else [self._connection]

    def events(self, ready: Sequence[Any]) -> Iterator[Event]:
        """Yield what the host tells; if it is gone, the end of all its workers."""
        if self._connection not in ready:
            return
        try:
            number, event = receive(self._connection)
        except (EOFError, OSError, ValueError):
            self.gone = True
            self._connection.close()
            lost, self.running = sorted(self.running), set()
            yield from ((number, Ended(-signal.SIGKILL)) for number in lost)
            return
        if isinstance(event, Hello):
            self.name = event.name
        if isinstance(event, Ended):
            self.running.discard(number)
        if not self._dying[number]:
            yield number, event
        elif isinstance(event, Ended):
            self._dying[number] -= 1

    def _send(self, number: int, message: Any) -> None:
        with suppress(OSError):  # it is gone; that comes next
            send(self._connection, number, message)


def serve(address: str, own: LocalHost, hello: Hello, lease_s: float) -> int:
    """Run workers for the agent at this address until the run ends; return its exit code.

    lease_s: after which silence of the network the agent counts as gone

    Raises RefusedError if the agent does not take this host.
    """
    former = {number: signal.signal(number, pass_on(own)) for number in SIGNALS}
    try:
        connection = enter(address, hello, max(lease_s, ENTRY_S), lease_s)
        while True:
            ready = wait([connection, *own.handles()])
            if connection in ready:
                number, message = receive(connection)
                if isinstance(message, Ended):
                    return message.code
                if message is Command.START:
                    own.start(number)
                elif message is Command.KILL:
                    if number in own.running:
                        own.kill(number)
                        send(connection, number, Ended(-signal.SIGKILL))
                else:
                    own.send(number, message)
            for number, event in own.events(ready):
                send(connection, number, event)
    except (EOFError, OSError):
        print(f"{hello.name}: the agent at {address} is gone: workers save and stop", file=sys.stderr, flush=True)
        own.leave()
        give_up = time.monotonic() + lease_s
        while own.running and time.monotonic() < give_up:
            list(own.events(wait(own.handles(), RETRY_S)))
        return INTERRUPTED
    finally:
        own.end()
        for number, handler in former.items():
            signal.signal(number, handler)


def enter(address: str, hello: Hello, patience_s: float, lease_s: float) -> Connection:
    """Connect to the agent and be taken. Raises RefusedError if it does not take this host, or nobody does in time."""
    try:
        connection = connect(address, patience_s, lease_s)
        send(connection, -1, hello)
        if not connection.poll(patience_s):
            raise TimeoutError("no answer")
        _, answer = receive(connection)
    except (EOFError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RefusedError(f"{address}: expected the host that leads, tried for {patience_s:g} s: {reason}") from error
    if answer is not Command.WELCOME:
        raise RefusedError(f"{address}: the agent runs another configuration")
    return connection


def pass_on(own: LocalHost) -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that passes signals on to the workers of this host."""
    return lambda number, frame: own.signal(number)
