"""Waits of tests end when something happens; their limit is for hangs, far above what a slow machine takes."""

import time
from collections.abc import Callable

LIMIT_S = 900.0


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
