"""Locks between processes of one machine."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from common.cli import UsageError


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Hold the lock file, so that only one process of this machine at a time is inside the block."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def alone(folder: Path, lock: str = ".lock", key: str = "") -> Iterator[None]:
    """Let one process of this machine at a time write to the folder, which is made.

    key: the argument that says which folder, for messages

    Raises UsageError if it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder / lock))
        except OSError as error:
            raise UsageError(f"{f'{key}=' * bool(key)}{folder}: cannot be written ({error})") from error
        yield
