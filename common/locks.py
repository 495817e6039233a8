"""Locks between processes of one machine."""

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from common.cli import UsageError

TELL_S = 30.0  # after which a wait is reported
LOOK_S = 0.1


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Hold the lock file, so that only one process of this machine at a time is inside the block.

    A long wait is reported on stderr: the process that holds the lock may have been stopped.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        tell = time.monotonic() + TELL_S
        while not _locked(lock):
            if time.monotonic() > tell:
                print(f"{file}: waiting for the process that holds this lock (fuser {file})", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
                break
            time.sleep(LOOK_S)
        yield


def _locked(lock: IO[str]) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def alone(folder: Path, lock: str = ".lock", key: str = "") -> Iterator[None]:
    """Let one process of this machine at a time write to the folder, which is created if it is missing.

    key: the argument that names the folder, for messages

    Raises UsageError if it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder / lock))
        except OSError as error:
            raise UsageError(f"{f'{key}=' * bool(key)}{folder}: cannot be written ({error})") from error
        yield
