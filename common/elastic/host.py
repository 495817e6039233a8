"""Worker processes on a host, this one or another, as the agent sees them.

Hosts are told what to do and tell what happens, see `common.elastic.wire`.
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

from common.elastic.membership import RETRY_S, Membership, Report, Word
from common.elastic.wire import (
    Challenge,
    Channel,
    Command,
    Ended,
    Hello,
    Refusal,
    Welcome,
    connect,
    draw_nonce,
    is_proof,
    prove,
    receive,
    send,
)
from common.record.exits import FINISHED, INTERRUPTED
from common.training.interruption import SIGNALS

GREETING_S = 10.0  # that a stranger at the agent's port has to say Hello
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
    """Workers of another host, at the agent. Until it is welcome it is a stranger, of whom only Hello counts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.running: set[int] = set()
        self.name: str | None = None  # of a host that was welcome
        self.nonce, self.their_nonce = draw_nonce(), ""
        self.gone = False
        self.fate = "is gone"
        self._greeting_ends = time.monotonic() + GREETING_S
        self._dying: Counter[int] = Counter()  # killed workers whose end the host has not told
        self._send(-1, Challenge(self.nonce))

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

    def welcome(self, name: str, proof: str) -> None:
        """Take the host."""
        self.name = name
        self._send(-1, Welcome(proof))

    def refuse(self, reason: str) -> None:
        """Do not take the host."""
        self._send(-1, Refusal(reason))
        self.drop()

    def stop(self) -> None:
        """Ask its workers to save and stop."""
        self._send(-1, Command.STOP)

    def finish(self, code: int) -> None:
        """Tell the host how the run has ended, and let it go."""
        self._send(-1, Ended(code))
        self.drop()

    def drop(self) -> None:
        """Close the connection."""
        self.gone = True
        self._channel.close()

    def handles(self) -> list[Any]:
        """Return the connection."""
        return [] if self.gone else [self._channel]

    def events(self, ready: Sequence[Any]) -> Iterator[Event]:
        """Yield the host's events; if it is gone, reads nothing or sends nonsense, the end of all its workers."""
        if self.gone:
            return
        try:
            if self._channel in ready:
                self._channel.fill()
            self._channel.flush()
            if self.name is None and time.monotonic() > self._greeting_ends:
                raise TimeoutError("no greeting")
            while not self.gone and self._channel.poll():
                number, event = receive(self._channel)
                if self._counts(number, event):
                    yield number, event
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, ValueError):
                self.fate = f"does not speak as a host of this run does and is dropped ({shortened(error)})"
            self.drop()
            lost, self.running = sorted(self.running), set()
            yield from ((number, Ended(-signal.SIGKILL)) for number in lost)

    def _counts(self, number: int, event: Any) -> bool:
        """Return whether to act on this event. Raises ValueError if this host must not send it."""
        if self.name is None:
            if isinstance(event, Challenge):
                self.their_nonce = event.nonce
            return isinstance(event, Hello)
        if not isinstance(event, Report | Ended):
            raise ValueError(f"unexpected {type(event).__name__}")
        if self._dying[number]:
            self._dying[number] -= isinstance(event, Ended)
            return False
        if number not in self.running:
            raise ValueError(f"{type(event).__name__} of rank {number}, which it does not run")
        if isinstance(event, Ended):
            self.running.discard(number)
        return True

    def _send(self, number: int, message: Any) -> None:
        with suppress(OSError):  # it is gone; that comes next
            send(self._channel, number, message)


def shortened(error: Exception) -> str:
    """Return the beginning of an error's message, in one line."""
    return " ".join(str(error).split())[:100]


class StoppedError(Exception):
    """A signal came before there was anything to save."""


def serve(address: str, own: LocalHost, hello: Hello, lease_s: float, secret: str = "") -> int:
    """Run workers for the agent at this address until the run ends; return its exit code.

    lease_s: after which silence of the network the agent counts as gone
    secret:  with which hosts and agent prove that they belong together; empty: none

    After a signal its workers save and stop; as soon as it has none, it returns 75, or 0 if the run has finished.

    Raises RefusedError if the agent does not take this host.
    """
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        own.signal(number)

    former = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        channel = enter(address, hello, max(lease_s, ENTRY_S), lease_s, secret)
        for number in SIGNALS:
            signal.signal(number, pass_on)
        return follow(channel, own, asked)
    except StoppedError:
        return INTERRUPTED
    except (EOFError, OSError, ValueError):
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


def follow(channel: Channel, own: LocalHost, asked: Sequence[int]) -> int:
    """Do what the agent says until the run ends or, once a signal was `asked`, no worker is left here.

    Raises EOFError, OSError or ValueError if the agent is gone.
    """
    codes = set()
    while own.running or not asked:
        ready = wait([channel, *own.handles()], RETRY_S)
        channel.flush()
        if channel in ready:
            channel.fill()
        while channel.poll():
            number, message = receive(channel)
            if isinstance(message, Ended):
                return message.code
            if message is Command.START:
                own.start(number)
                if asked:  # it has missed the signal
                    own.kill(number)
                    send(channel, number, Ended(INTERRUPTED))
            elif message is Command.STOP:
                own.signal(signal.SIGTERM)
            elif message is Command.KILL:
                if number in own.running:
                    own.kill(number)
                    send(channel, number, Ended(-signal.SIGKILL))
            else:
                own.send(number, message)
        for number, event in own.events(ready):
            if isinstance(event, Ended):
                if asked and -event.code in SIGNALS:
                    event = Ended(INTERRUPTED)  # before it held anything to save
                codes.add(event.code)
            send(channel, number, event)
    return FINISHED if FINISHED in codes else INTERRUPTED


def enter(address: str, hello: Hello, patience_s: float, lease_s: float, secret: str = "") -> Channel:
    """Connect to the agent and be taken. Raises RefusedError if it does not take this host, or nobody does in time."""
    give_up = time.monotonic() + patience_s
    try:
        channel = connect(address, patience_s, lease_s)
        nonce = draw_nonce()
        send(channel, -1, Challenge(nonce))
        challenge = answer(channel, give_up)
        if not isinstance(challenge, Challenge):
            raise ValueError(f"unexpected {type(challenge).__name__}")
        proof = prove(secret, "host", challenge.nonce, hello.name, hello.fingerprint)
        send(channel, -1, hello._replace(proof=proof))
        said = answer(channel, give_up)
    except (EOFError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RefusedError(f"{address}: expected the host that leads, tried for {patience_s:g} s: {reason}") from error
    if isinstance(said, Refusal):
        raise RefusedError(f"{address}: {said.reason}")
    if not isinstance(said, Welcome) or not is_proof(said.proof, secret, "agent", nonce, challenge.nonce):
        raise RefusedError(f"{address}: the agent does not know this host's ELASTIC_SECRET")
    return channel


def answer(channel: Channel, give_up: float) -> Any:
    """Wait for a message until this time and return it. Raises TimeoutError."""
    while not channel.poll():
        left = give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer")
        if wait([channel], left):
            channel.fill()
    return receive(channel)[1]
