"""A port that a process started by a test can listen at."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port below those that the kernel gives to outgoing connections, so that none takes it meanwhile."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as server:
            return server.getsockname()[1]
