"""Signs of life of ranks, for the waits in which patience with a peer has no narrow bound of its own.

A rank that prepares data or writes a model may take minutes, while others wait for it; one that was stopped, or whose
node hangs, would seem to do so. Each rank has a thread that counts in a store and looks whether the next rank does, so
one that is still alive always looks at one that is not.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.parallel.process_groups import WATCH_FIRST, abort_groups

BEAT_S = 5.0
OVER = b"over"
LEAVE_S = 10.0  # in which what waited for peers may tell where it was


class Pulse:
    """A rank's signs of life, until it is closed.

    connect:    returns a store, this rank and the number of ranks; called in the thread, as it waits for the store.
                Nobody else may use that object: while one thread waits in it, it answers no other
    patience_s: a rank is lost if it is silent for that long after its first sign
    lost:       called in the thread, with a sentence
    """

    def __init__(
        self, connect: Callable[[], tuple[dist.Store, int, int]], patience_s: float, lost: Callable[[str], object]
    ) -> None:
        self._connect, self._patience_s, self._lost = connect, patience_s, lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the signs, and tell the rank that looks at them."""
        self._over.set()
        self._thread.join(1.0)  # it may still wait for the store

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone with the process that held it
            store, rank, ranks = self._connect()
            store, own, other = dist.PrefixStore("pulse", store), str(rank), str((rank + 1) % ranks)
            period, number, silent, last = min(BEAT_S, self._patience_s / 4), 0, 0, None
            while silent * period < self._patience_s:  # looks, not seconds: all ranks may have been suspended
                store.set(own, str(number))
                if self._over.wait(period):
                    store.set(own, OVER)
                    return
                number += 1
                sign = store.get(other) if store.check([other]) else None
                silent = silent + 1 if sign == last and sign not in (None, OVER) else 0
                last = sign
            self._lost(
                f"rank {rank}: rank {other} has given no sign of life for {self._patience_s:g} s: it was stopped, or "
                "its node hangs"
            )


def open_pulse(timeout_s: float) -> Pulse:
    """Begin this rank's signs of life, as a launcher has started it; if another rank is lost, this process ends.

    timeout_s: of the model's own groups, whose errors name the message that is missing, and therefore come first
    """
    patience = timedelta(seconds=timeout_s) + WATCH_FIRST
    return Pulse(lambda: next(dist.rendezvous("env://")), patience.total_seconds(), _leave)


def _leave(sentence: str) -> None:
    """Make what waits for peers raise; end the process if that does not: on GPUs, or where it waits for a file."""
    sys.stderr.write(f"{sentence}\n")
    abort_groups()
    time.sleep(LEAVE_S)
    os._exit(1)
