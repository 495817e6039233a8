"""What a launcher of several processes, such as torchrun, tells each of them through environment variables."""

import os
import socket
import sys
import time

DIGITS = 9  # of the longest number that is read
LARGEST_PORT = 65535
UNKNOWN_S = 60.0  # for a host's name to become known, as when all hosts of a job start at once


def from_launcher(name: str) -> int | None:
    """Return a number that torchrun or srun sets in the environment of its processes; None if it is not set.

    Raises ValueError if it is not a number.
    """
    value = os.environ.get(name, "")
    if not value:
        return None
    if not value.isdecimal() or len(value) > DIGITS:
        raise ValueError(f"{name}={value} in the environment: expected a number, or nothing without a launcher")
    return int(value)


def check_launcher() -> None:
    """Raise ValueError naming the first variable that does not fit the others, if this is a launcher's process."""
    for name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, size = from_launcher(name), from_launcher(size_name)
        if size == 0:
            raise ValueError(f"{size_name}=0 in the environment: expected at least 1, or nothing without a launcher")
        if None not in (number, size) and number >= size:
            raise ValueError(f"{name}={number} in the environment: expected less than {size_name}={size}")
    if from_launcher("RANK") is None:
        return
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is missing in the environment: expected what torchrun sets, as RANK is there")
    if (local := from_launcher("LOCAL_WORLD_SIZE") or 1) > (size := from_launcher("WORLD_SIZE")):
        raise ValueError(f"LOCAL_WORLD_SIZE={local} in the environment: expected at most WORLD_SIZE={size}")
    if not 0 < (port := from_launcher("MASTER_PORT")) <= LARGEST_PORT:
        raise ValueError(f"MASTER_PORT={port} in the environment: expected a port from 1 to {LARGEST_PORT}")


def find_master(timeout_s: float = UNKNOWN_S) -> None:
    """Wait until MASTER_ADDR is a name that this host knows. Raises ValueError if it still is not after `timeout_s`."""
    name, end, said = os.environ["MASTER_ADDR"], time.monotonic() + timeout_s, False
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:
            problem = f"MASTER_ADDR={name} in the environment: expected an address of rank 0's host ({error})"
        if time.monotonic() >= end:
            raise ValueError(problem)
        if not said:
            print(f"{problem}; waiting for it at most {timeout_s:g} s", file=sys.stderr, flush=True)
        said = True
        time.sleep(1)
