"""Heartbeats of ranks, by which other ranks tell a busy rank from one that was stopped.

Preparing data or writing a model may take minutes, and the other ranks wait that long for it. Each rank has a thread
that increments a counter in a store and watches the next rank's counter. If some ranks stop, one that still runs
watches one that does not.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.parallel.making_groups import abort_groups
from common.parallel.process_groups import WATCH_FIRST

BEAT_S = 5.0
OVER = b"over"
LEAVE_S = 10.0  # for the interrupted wait to report where it was


class Pulse:
    """The heartbeat of a rank, until it is closed.

    connect:    returns a store, this rank and the world size; called in the thread, because it may block. The store
                must be used by this thread only: it serves one caller at a time
    patience_s: a rank counts as lost when its counter has not moved for that long after its first heartbeat
    lost:       called in the thread with a message
    """

    def __init__(
        self, connect: Callable[[], tuple[dist.Store, int, int]], patience_s: float, lost: Callable[[str], object]
    ) -> None:
        self._connect, self._patience_s, self._lost = connect, patience_s, lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat, and tell the rank that watches it."""
        self._over.set()
        self._thread.join(1.0)  # it may still wait for the store

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone with the process that held it
            store, rank, ranks = self._connect()
            store, own, other = dist.PrefixStore("pulse", store), str(rank), str((rank + 1) % ranks)
            period, number, silent, last = min(BEAT_S, self._patience_s / 4), 0, 0, None
            while silent * period < self._patience_s:  # counts looks, not seconds: all ranks may have been suspended
                store.set(own, str(number))
                if self._over.wait(period):
                    store.set(own, OVER)
                    return
                number += 1
                sign = store.get(other) if store.check([other]) else None
                silent = silent + 1 if sign == last and sign not in (None, OVER) else 0
                last = sign
            self._lost(
                f"rank {rank}: rank {other} has had no heartbeat for {self._patience_s:g} s: it was stopped, or "
                "its node hangs"
            )


def open_pulse(timeout_s: float) -> Pulse:
    """Start the heartbeat of a rank that a launcher started; end this process if the rank it watches is lost.

    timeout_s: timeout of the model's process groups; they fail first, because their errors name the missing message
    """
    patience = timedelta(seconds=timeout_s) + WATCH_FIRST
    return Pulse(lambda: next(dist.rendezvous("env://")), patience.total_seconds(), _leave)


def _leave(sentence: str) -> None:
    """Make waits for peers raise, then end the process if it still runs, as on GPUs or while waiting for a file."""
    sys.stderr.write(f"{sentence}\n")
    abort_groups()
    time.sleep(LEAVE_S)
    os._exit(1)
