"""Waits of tests end when something happens; their limit is for hangs, far above what a slow machine takes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 900.0


class Resources(NamedTuple):
    """What a process holds."""

    threads: int
    files: int
    megabytes: float


def held(process: int | str = "self") -> Resources:
    """Return what a process holds now."""
    folder = Path(f"/proc/{process}")
    pages = int((folder / "statm").read_text().split()[1])
    threads, files = (len(os.listdir(folder / what)) for what in ("task", "fd"))
    return Resources(threads, files, pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def processes_in(session: int) -> list[int]:
    """Return the live processes of a session, which they inherit from any parent."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found
