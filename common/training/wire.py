"""What hosts send each other through the agent's port.

    to a host    Command, or a message for one of its workers
    from a host  Hello first; then what a worker reports, and that one has ended

Messages are JSON: what comes from a network is not unpickled. Whoever reaches the port can join a run, as with torch's
stores.
"""

import json
import socket
import time
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from common.training.membership import Membership, Report, Word

LOCAL = "127.0.0.1"
LONGEST = 1 << 20  # bytes of a message
RETRY_S = 0.5


class Hello(NamedTuple):
    """A host offers its places.

    fingerprint: of its configuration
    """

    name: str
    fingerprint: str


class Command(Enum):
    """What a host does to a worker; WELCOME: it is taken, and waits until it is needed."""

    START = auto()
    KILL = auto()
    WELCOME = auto()


class Ended(NamedTuple):
    """A worker's process has ended, or with number -1 the run has; code: its exit code, negative for a signal."""

    code: int


KINDS = {kind.__name__: TypeAdapter(kind) for kind in (Hello, Command, Ended, Report, Membership, Word)}


def listen(address: str) -> socket.socket | None:
    """Listen at HOST:PORT; None if the address is another host's, or an agent listens there already."""
    host, port = split(address)
    try:
        return socket.create_server((host, port))
    except OSError:
        return None


def connect(address: str, patience_s: float, lease_s: float) -> Connection:
    """Connect to the agent, which may not listen yet. Raises OSError if it does not in time."""
    give_up = time.monotonic() + patience_s
    while True:
        try:
            channel = socket.create_connection(split(address), timeout=patience_s)
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(RETRY_S)
            continue
        return as_connection(channel, lease_s)


def as_connection(channel: socket.socket, lease_s: float) -> Connection:
    """Turn a socket into a connection that ends when nothing is heard from the other host for about `lease_s`."""
    channel.setblocking(True)
    quarter = max(1, int(lease_s / 4))
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lease_s * 1000))
    return Connection(channel.detach())


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def send(connection: Connection, number: int, message: Any) -> None:
    """Send a message of one of KINDS to, or from, a worker."""
    kind = type(message).__name__
    connection.send_bytes(json.dumps([number, kind, KINDS[kind].dump_python(message, mode="json")]).encode())


def receive(connection: Connection) -> tuple[int, Any]:
    """Return (worker, message). Raises EOFError or OSError at the end, ValueError for what is none of ours."""
    try:
        number, kind, value = json.loads(connection.recv_bytes(LONGEST))
        return int(number), KINDS[kind].validate_python(value)
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"not a message: {error}") from error
