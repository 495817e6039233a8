"""The messages that hosts send each other through the agent's port.

    to a host    Challenge; Welcome or Refusal; then Command, or a message for one of its workers
    from a host  Challenge; Hello; then the reports of its workers, and which one has ended

Messages are JSON: nothing from this port is unpickled. Hosts that know ELASTIC_SECRET prove it to each other;
without a secret, anyone who reaches the port and knows the configuration can join the run. This protects only this
port: the store through which members then find each other (torch's TCPStore, on all interfaces) and the objects that
they gather (pickles, over gloo) trust the network.
"""

import errno
import hashlib
import hmac
import ipaddress
import json
import operator
import os
import socket
import struct
import time
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from common.config.elastic import split
from common.elastic.membership import RETRY_S, Membership, Notice, Report

LOCAL = "127.0.0.1"
LONGEST = 1 << 20  # bytes of a message
CHUNK = 1 << 16
HEAD = struct.Struct("!i")  # as in multiprocessing's connections
# Ends each message, so that a line-based service on the agent's port, such as a web server, rejects it at once.
END = b"\r\n\r\n"


class Challenge(NamedTuple):
    """Both sides send it first: with this number the other side has to prove that it knows the secret."""

    nonce: str


class Hello(NamedTuple):
    """A host offers to run workers; fingerprint: of its configuration."""

    name: str
    fingerprint: str
    proof: str = ""


class Welcome(NamedTuple):
    """The host is accepted, and waits until it is needed."""

    proof: str = ""


class Refusal(NamedTuple):
    """The host is refused."""

    reason: str


class Command(Enum):
    """What a host has to do with a worker; STOP: with all workers, as if the host had received a signal."""

    START = auto()
    KILL = auto()
    STOP = auto()


class Ended(NamedTuple):
    """A worker's process has ended, or with number -1 the run has; code: its exit code, negative for a signal."""

    code: int


KINDS = {
    kind.__name__: TypeAdapter(kind)
    for kind in (Challenge, Hello, Welcome, Refusal, Command, Ended, Report, Membership, Notice)
}


class Channel:
    """The connection between two hosts. It reads what has arrived and sends what fits into the buffers; it never waits.

    timeout_s: after which it counts as broken if the other host is silent or accepts nothing
    """

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        quarter = max(1, int(timeout_s / 4))
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        self._link, self._timeout_s = link, timeout_s
        self._received, self._to_send = bytearray(), bytearray()
        self._last_sent = time.monotonic()

    def fileno(self) -> int:
        """Return the file descriptor to wait for with `multiprocessing.connection.wait`."""
        return self._link.fileno()

    def fill(self) -> None:
        """Read what has arrived. Raises EOFError at the end, OSError if the connection is broken."""
        with suppress(BlockingIOError):
            data = self._link.recv(CHUNK)
            if not data:
                raise EOFError
            self._received += data

    def poll(self) -> bool:
        """Return whether a whole message has arrived. Raises ValueError for one of another protocol."""
        if len(self._received) < HEAD.size:
            return False
        (length,) = HEAD.unpack_from(self._received)
        if not 0 <= length <= LONGEST:
            raise ValueError(f"not a message: {length} bytes, expected at most {LONGEST}")
        return len(self._received) >= HEAD.size + length

    def recv_bytes(self) -> bytes:
        """Return the message that has arrived."""
        (length,) = HEAD.unpack_from(self._received)
        message = bytes(self._received[HEAD.size : HEAD.size + length])
        del self._received[: HEAD.size + length]
        return message

    def send_bytes(self, message: bytes) -> None:
        """Send a message, now or in `flush`. Raises OSError if the connection is broken."""
        if not self._to_send:
            self._last_sent = time.monotonic()
        self._to_send += HEAD.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what is queued. Raises OSError if the connection is broken, or took nothing for `timeout_s`."""
        with suppress(BlockingIOError):
            while self._to_send:
                del self._to_send[: self._link.send(self._to_send)]
                self._last_sent = time.monotonic()
        if self._to_send and time.monotonic() > self._last_sent + self._timeout_s:
            raise TimeoutError(f"took nothing for {self._timeout_s:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


class Listener(socket.socket):
    """The socket on which an agent listens; its mark shows other processes of this machine that it is an agent's."""

    mark: socket.socket | None = None

    def close(self) -> None:
        """Stop listening."""
        if self.mark is not None:
            self.mark.close()
        super().close()


def listen(address: str) -> Listener | None:
    """Listen at HOST:PORT; None if the address is another host's, or an agent of this host listens there already.

    Raises OSError or ValueError if no host can listen there.
    """
    for place in resolve(address):
        mark = None
        if place[1]:
            mark = socket.socket(socket.AF_UNIX)
            try:
                mark.bind(f"\0elastic agent at {place}")  # an abstract name, gone when this process ends
            except OSError:
                mark.close()
                return None
        try:
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            listener = Listener(fileno=socket.create_server(place, family=family).detach())
        except OSError as error:
            if mark is not None:
                mark.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            if error.errno == errno.EADDRINUSE:
                raise OSError("another program of this host listens there; choose another port") from error
            raise
        listener.mark = mark
        return listener
    return None


def resolve(address: str) -> list[tuple[str, int]]:
    """Return the addresses of HOST:PORT. Raises OSError or ValueError if there is none that hosts could share."""
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OSError(f"{host!r} is not the name or address of a host ({error})") from error
    places = list(dict.fromkeys((place[0], port) for *_, place in found))
    for place, _ in places:
        if ipaddress.ip_address(place.partition("%")[0]).is_unspecified:
            raise ValueError(f"{place} is every host's; expected an address that only the leading host has")
    return places


def only_here(place: str) -> bool:
    """Return whether only this machine reaches an address."""
    return ipaddress.ip_address(place.partition("%")[0]).is_loopback


def connect(address: str, search_s: float, timeout_s: float) -> Channel:
    """Connect to the agent, which may not be listening yet. Raises OSError if it still is not after `search_s`."""
    give_up = time.monotonic() + search_s
    while True:
        try:
            return Channel(socket.create_connection(split(address), timeout=search_s), timeout_s)
        except OSError as error:
            unknown = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
            if unknown or time.monotonic() > give_up:
                raise
            time.sleep(RETRY_S)


def draw_nonce() -> str:
    """Return a number that is used once."""
    return os.urandom(16).hex()


def prove(secret: str, *words: str) -> str:
    """Return a proof that the sender of these words knows the secret."""
    return hmac.new(os.fsencode(secret), json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(proof: str, secret: str, *words: str) -> bool:
    """Return whether this is what `prove` returns, or there is no secret."""
    return not secret or hmac.compare_digest(proof.encode(), prove(secret, *words).encode())


def send(channel: Channel, number: int, message: Any) -> None:
    """Send a message of one of KINDS to, or from, a worker."""
    kind = type(message).__name__
    channel.send_bytes(json.dumps([number, kind, KINDS[kind].dump_python(message, mode="json")]).encode() + END)


def receive(channel: Channel) -> tuple[int, Any]:
    """Return (worker, message), once `channel.poll()` is true. Raises ValueError if it is not one of our messages."""
    content = channel.recv_bytes()
    try:
        number, kind, value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return operator.index(number), KINDS[kind].validate_python(value)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {error}") from error
