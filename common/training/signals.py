"""Signals that ask a run to save and stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# SIGUSR1: Slurm's warning before the time limit. SIGHUP: the terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup
    SIGNALS += (signal.SIGHUP,)


class StoppedError(KeyboardInterrupt):
    """A signal came while nothing was training."""


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Raise StoppedError at a signal: outside the training loop, which has its own handlers, nothing needs saving."""
    former = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError(f"received {signal.Signals(number).name}")
