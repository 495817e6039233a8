"""Locks between processes of one machine."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Hold the lock file, so that only one process of this machine at a time is inside the block."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
