"""The agent of a run that survives the loss of workers: it starts them, notices deaths, and decides who trains.

The agent is the launching process and does not train. A run has a single agent, so workers cannot disagree about who
the members are; if it dies, all workers save and stop. It notices deaths at once, from the operating system, and
silence after `parallel.timeout_s`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from common.training.elastic_config import ElasticConfig, Members
from common.training.interruption import SIGNALS
from common.training.membership import HOST, Membership, Report, Word

FINISHED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 75
ATTEMPTS = 3  # memberships in a row that break although nobody died


class Child(NamedTuple):
    """A worker process, and the agent's end of its pipe; None once that is closed."""

    process: BaseProcess
    connection: Connection | None


class Agent:
    """Runs the workers of one run to the end.

    start:      creates a worker's process, given its number and its end of the pipe
    workers:    number of workers in the run
    first:      numbers of the workers that train from the start; all others join later
    patience_s: seconds that the other members have to report after the first one did
    """

    def __init__(
        self,
        start: Callable[[int, Connection], BaseProcess],
        workers: int,
        first: Members,
        options: ElasticConfig,
        patience_s: float,
    ) -> None:
        self._start, self._workers, self._options, self._patience_s = start, workers, options, patience_s
        self._restarts = options.restarts
        self._children: dict[int, Child] = {}
        self._codes: list[int] = []
        self._number = -1  # of the membership
        self._members = first
        self._alive = set(first)  # of these
        self._reports: dict[int, Report] = {}
        self._changing = True  # members leave the membership, or it has not begun
        self._deadline: float | None = None
        self._store: dist.TCPStore | None = None
        self._failures = 0
        self._stopping = False  # a signal asked for it
        self._over = False  # a worker has come to the end

    def run(self) -> int:
        """Start the workers, see them through, and return the exit code of the run."""
        former = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        try:
            for number in range(self._workers):
                self._spawn(number)
            while self._children:
                self._turn()
        finally:
            for child in self._children.values():
                child.process.kill()
            for number, handler in former.items():
                signal.signal(number, handler)
        for code in (FINISHED, INTERRUPTED, BAD_CONFIGURATION):
            if code in self._codes:
                return code
        return FAILED

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        by_handle = {child.connection: number for number, child in self._children.items() if child.connection}
        ready = wait([*by_handle, *(child.process.sentinel for child in self._children.values())], left)
        for handle in ready:
            if handle in by_handle:
                self._hear(by_handle[handle])
        for number, child in list(self._children.items()):
            if child.process.sentinel in ready:
                self._bury(number, child)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            for number in self._alive - self._reports.keys():
                self._tell(f"worker {number} is silent for {self._patience_s:g} s and is killed")
                self._children[number].process.kill()
        if self._changing and not self._over and self._alive <= self._reports.keys():
            self._name_members()

    def _hear(self, number: int) -> None:
        child = self._children[number]
        try:
            report = child.connection.recv()
        except (EOFError, OSError):  # it is about to end
            self._children[number] = child._replace(connection=None)
            return
        self._reports[number] = report
        if self._over:
            self._say(Word.OVER, {number})
        elif number in self._alive:
            self._begin_change(report.lost)
        elif not self._changing:
            self._say(Word.WAITING, self._alive)

    def _begin_change(self, lost: bool) -> None:
        if not self._changing:
            self._changing = True
            self._deadline = time.monotonic() + self._patience_s
        if lost:
            self._store = None  # ends the waiting of those that connect
            self._say(Word.LOST, self._alive - self._reports.keys())

    def _bury(self, number: int, child: Child) -> None:
        child.process.join()
        code = child.process.exitcode or 0
        del self._children[number]
        self._codes.append(code)
        was_member = number in self._alive
        self._alive.discard(number)
        self._reports.pop(number, None)
        if code in (FINISHED, INTERRUPTED):
            self._over = True
            self._say(Word.OVER, set(self._reports))
            return
        if code == BAD_CONFIGURATION and self._number <= 0:  # it has said what is wrong
            self._end_all()
            return
        self._tell(f"worker {number} died ({describe(code)})")
        if self._number < 0:
            self._end_all()
        else:
            if was_member:
                self._begin_change(lost=True)
            if self._restarts and not self._stopping and not self._over:
                self._restarts -= 1
                self._spawn(number)

    def _name_members(self) -> None:
        """Start the next membership: the surviving members and the workers waiting to join."""
        reports = {number: self._reports[number] for number in sorted(self._alive)}
        holders = {number: report for number, report in reports.items() if report.members}
        first = self._number < 0  # joiners need a state to copy
        joining = set() if first else self._reports.keys() - self._alive
        lost = any(report.lost for report in reports.values())
        deaths = len(self._members) - len(self._alive)
        self._failures = self._failures + 1 if lost and not deaths else 0
        if not first and (not holders or self._failures > ATTEMPTS):
            self._tell("no worker is left that could go on")
            self._end_all()
            return
        few = 2 * len(self._alive) <= len(self._members) or len(self._alive | joining) < (
            self._options.min_workers or 1
        )
        last = few and not first
        if last:
            self._tell(f"{len(self._alive)} of {len(self._members)} workers are left, too few: they save and stop")
        newest = max(holders.values(), key=lambda report: report.clock, default=Report())
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._number += 1
        self._members = tuple(sorted(self._alive if last else self._alive | joining))
        membership = Membership(
            number=self._number,
            members=self._members,
            before=newest.members,
            holders=tuple(holders),
            clock=newest.clock,
            dealing=newest.dealing,
            reports={number: (report.clock, report.merged) for number, report in holders.items()},
            lost=lost,
            last=last,
            port=self._store.port,
        )
        self._alive, self._changing, self._deadline = set(self._members), False, None
        for number in self._members:
            del self._reports[number]
        self._say(membership, self._alive)
        if self._reports and not last:
            self._say(Word.WAITING, self._alive)

    def _spawn(self, number: int) -> None:
        mine, theirs = Pipe()
        process = self._start(number, theirs)
        process.start()
        theirs.close()
        self._children[number] = Child(process, mine)

    def _say(self, message: Membership | Word, numbers: set[int]) -> None:
        for number in numbers:
            connection = self._children[number].connection
            with suppress(OSError):  # it died; that comes next
                if connection is not None:
                    connection.send(message)

    def _end_all(self) -> None:
        for child in self._children.values():
            child.process.kill()
        for child in self._children.values():
            child.process.join()
        self._children.clear()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        for child in self._children.values():
            if child.process.pid is not None and child.process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, number)

    @staticmethod
    def _tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


def describe(code: int) -> str:
    """Return what ended a process: the name of a signal, or its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
