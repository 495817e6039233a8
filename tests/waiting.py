"""Waits of tests end when something happens; their limit is for hangs, far above what a slow machine takes."""

import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 900.0


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
