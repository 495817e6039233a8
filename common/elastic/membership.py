"""The messages by which the ranks of a run and their agent agree on who trains.

A *membership* is the set of ranks that train from one change to the next; the agent numbers them. Its members report
when they are ready, when they have lost a peer, or when all have stopped so that another one can join. When all
living members have reported, the agent names the next members, which connect anew.
"""

import gc
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch.distributed as dist

from common.config.elastic import Ranks
from common.parallel import making_groups
from common.parallel.making_groups import NewGroups
from common.training.interruption import Request
from common.training.stream import BEGINNING, Dealing

RETRY_S = 0.5


class Report(NamedTuple):
    """What a rank holds when it leaves a membership.

    members: the ranks that trained in it; empty: none yet, this rank has no state
    clock:   committed updates
    merged:  buckets that were merged in the last round, which failed; None: all
    dealing: where the data continue
    lost:    whether a peer is gone
    """

    members: Ranks = Ranks(())
    clock: int = 0
    merged: int | None = None
    dealing: Dealing = BEGINNING
    lost: bool = False


class Membership(NamedTuple):
    """Which ranks train from now on: the members.

    before:  the ranks that trained until now; empty at the beginning
    holders: members that have a state; the others get a copy. Empty: all begin with a new run or its checkpoint
    clock:   number of updates from which all continue, the most that any worker's first rank has committed
    dealing: where the data continue
    reports: {rank: (clock, merged)}, the outcome of the last round for each worker's first rank
    lost:    whether a rank was lost; if not, all stopped at `clock`
    last:    whether too few are left, so that they save and stop
    address: with port, of the store through which members find each other
    start:   the start for which the agent has claimed the run folder
    """

    number: int
    members: Ranks
    before: Ranks
    holders: Ranks
    clock: int
    dealing: Dealing
    reports: Mapping[int, tuple[int, int | None]]
    lost: bool
    last: bool
    address: str
    port: int
    start: str = ""


class Notice(Enum):
    """Other messages of the agent."""

    WAITING = auto()  # a rank wants to join: stop together
    LOST = auto()  # a member is gone: whatever waits for peers has to end
    OVER = auto()  # the run has ended


class DismissedError(RuntimeError):
    """Training is over for this worker: the run or its agent ended, or a signal came before it had a state to save."""


class Member:
    """A process's side of the protocol. A thread listens to the agent all the time.

    number: of the rank when the run began
    groups: how the members connect
    """

    def __init__(self, number: int, connection: Connection, groups: NewGroups | None = None) -> None:
        self.number = number
        self.groups = groups or NewGroups()
        self._connection = connection
        self._request = Request.NOTHING
        self._named: queue.SimpleQueue[Membership | str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    def request(self) -> Request:
        """Return what the agent wants: nothing, a change of members (LEAVE: at once), or STOP if the agent is gone."""
        return self._request

    def next(self, report: Report, asked: Callable[[], bool] = lambda: False) -> Membership:
        """Report, and wait to be named a member. Raises DismissedError if that will not happen.

        asked: whether a signal has asked this process to stop; this ends the wait if there is no state to save
        """
        with suppress(OSError):  # the listening thread notices it too
            self._connection.send(report)
        named = None
        while named is None:
            with suppress(queue.Empty):
                named = self._named.get(timeout=RETRY_S)
            if named is None and asked() and not report.members:
                named = "it was asked to stop before it held anything to save"
        if isinstance(named, str):
            raise DismissedError(named)
        return named

    def connect(self, membership: Membership, timeout_s: float) -> int:
        """Open the default process group among the members; return this process's rank in it."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(membership.address, membership.port, is_master=False, timeout=timeout)
        rank = membership.members.index(self.number)
        making_groups.current = self.groups
        self.groups.open(store, membership.number, rank, len(membership.members), timeout)
        return rank

    def disconnect(self, lost: bool) -> None:
        """Take all process groups down; if a peer is gone, close their connections first."""
        if lost:
            self.groups.abort()
        self.groups.end()
        gc.collect()  # groups and wrappers are in reference cycles, with their threads and sockets

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._request = Request.STOP
                self._named.put("its agent has died")
                return
            match message:
                case Membership():
                    self._request = Request.NOTHING
                    self._named.put(message)
                case Notice.WAITING:
                    self._request = Request.CHANGE
                case Notice.LOST:
                    self._request = Request.LEAVE
                    self.groups.abort()
                case Notice.OVER:
                    self._named.put("the run has ended")
