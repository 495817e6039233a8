"""Waits of tests end when something happens; their limit is for hangs, far above what a slow machine takes."""

import time
from collections.abc import Callable

LIMIT_S = 900.0


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
