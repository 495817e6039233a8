"""Worker processes of another host: how the agent commands them, and what runs on that host.

Messages between hosts: see `common.elastic.wire`.
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from common.cli import one_line
from common.elastic.host import Event, LocalHost, StoppedError
from common.elastic.membership import RETRY_S, Report
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
from common.record import FINISHED, INTERRUPTED
from common.training.signals import SIGNALS

HELLO_S = 10.0  # within which a connection to the agent's port has to say Hello
JOIN_S = 120.0  # the least time to look for the agent: it answers once it has imported everything
PATIENCE_S = 5 * JOIN_S  # the nodes of a job start together: one that is missing for longer does not come


class RefusedError(RuntimeError):
    """The agent does not accept this host."""


class RemoteHost:
    """The agent's side of another host with workers; until the host is accepted, only its Hello is acted on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.running: set[int] = set()
        self.name: str | None = None  # once the host is accepted
        self.nonce, self.their_nonce = draw_nonce(), ""
        self.gone = self.leaving = False
        self.why_gone = "is gone"
        self._hello_until = time.monotonic() + HELLO_S
        self._dying: Counter[int] = Counter()  # killed workers whose exit the host has not reported
        self.send(-1, Challenge(self.nonce))

    def start(self, number: int) -> None:
        """Start a process."""
        self.running.add(number)
        self.send(number, Command.START)

    def kill(self, number: int) -> None:
        """Kill a process; its exit is not reported, because the host may not answer either."""
        self.running.discard(number)
        self._dying[number] += 1
        self.send(number, Command.KILL)

    def accept(self, name: str, proof: str) -> None:
        """Accept the host."""
        self.name = name
        self.send(-1, Welcome(proof))

    def refuse(self, reason: str) -> None:
        """Refuse the host."""
        self.send(-1, Refusal(reason))
        self.drop()

    def stop(self) -> None:
        """Ask its workers to save and stop."""
        self.send(-1, Command.STOP)

    def finish(self, code: int) -> None:
        """Tell the host how the run has ended, and let it go."""
        self.send(-1, Ended(code))
        self.drop()

    def drop(self) -> None:
        """Close the connection."""
        self.gone = True
        self._channel.close()

    def handles(self) -> list[Any]:
        """Return the connection."""
        return [] if self.gone else [self._channel]

    def events(self, ready: Sequence[Any]) -> Iterator[Event]:
        """Yield the host's events; if it is gone, reads nothing or sends nonsense, yield the end of all its workers."""
        if self.gone:
            return
        try:
            if self._channel in ready:
                self._channel.fill()
            self._channel.flush()
            if self.name is None and time.monotonic() > self._hello_until:
                raise TimeoutError("no Hello")
            while not self.gone and self._channel.poll():
                number, event = receive(self._channel)
                if self._counts(number, event):
                    yield number, event
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, ValueError):
                self.why_gone = f"does not speak as a host of this run does and is dropped ({one_line(error)[:100]})"
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

    def send(self, number: int, message: Any) -> None:
        """Send to a process, or to the host as number -1."""
        with suppress(OSError):  # it is gone; `events` notices next
            send(self._channel, number, message)


def serve(address: str, own: LocalHost, hello: Hello, timeout_s: float, secret: str = "") -> int:
    """Run workers for the agent at this address until the run ends; return its exit code.

    timeout_s: silence of the network after which the agent counts as gone
    secret:    a secret with which hosts and agent prove that they belong together; empty: none

    After a signal the workers save and stop; once none is left, 75 is returned, or 0 if the run has finished.

    Raises RefusedError if the agent does not accept this host.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        own.signal(number)

    former = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        channel = join(address, hello, max(timeout_s, JOIN_S), timeout_s, secret)
        for number in SIGNALS:
            signal.signal(number, pass_on)
        return run_commands(channel, own, asked)
    except StoppedError:
        return INTERRUPTED
    except (EOFError, OSError, ValueError):
        print(f"{hello.name}: the agent at {address} is gone: workers save and stop", file=sys.stderr, flush=True)
        own.disconnect()
        give_up = time.monotonic() + timeout_s
        while own.running and time.monotonic() < give_up:
            list(own.events(wait(own.handles(), RETRY_S)))
        return INTERRUPTED
    finally:
        own.end()
        for number, handler in former.items():
            signal.signal(number, handler)


def run_commands(channel: Channel, own: LocalHost, asked: Sequence[int]) -> int:
    """Do what the agent says until the run ends or, once a signal is in `asked`, no worker is left here.

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


def join(address: str, hello: Hello, search_s: float, timeout_s: float, secret: str = "") -> Channel:
    """Connect to the agent. Raises RefusedError if it does not accept this host, or none answers in time."""
    give_up = time.monotonic() + search_s
    try:
        channel = connect(address, search_s, timeout_s)
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
        raise RefusedError(f"{address}: expected the host that leads, tried for {search_s:g} s: {reason}") from error
    if isinstance(said, Refusal):
        raise RefusedError(f"{address}: {said.reason}")
    if not isinstance(said, Welcome) or not is_proof(said.proof, secret, "agent", nonce, challenge.nonce):
        raise RefusedError(f"{address}: the agent does not know this host's ELASTIC_SECRET")
    return channel


def answer(channel: Channel, give_up: float) -> Any:
    """Return the next message. Raises TimeoutError if none has arrived by `give_up`."""
    while not channel.poll():
        left = give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer")
        if wait([channel], left):
            channel.fill()
    return receive(channel)[1]
