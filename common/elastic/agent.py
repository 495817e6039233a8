"""The agent of a run that survives the loss of workers: it has them started, notices deaths, decides who trains.

Its members are processes, the ranks of workers. A worker that loses a rank is lost as a whole.

The agent is the launching process of the first host and does not train. A run has a single agent, so workers cannot
disagree about who the members are; if it dies, all workers save and stop. It notices deaths at once, from the operating
system of their host; the loss of a host, and silence, after `parallel.timeout_s`.
"""

import signal
import socket
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from types import FrameType

import torch.distributed as dist

from common.config.elastic import ElasticConfig, Members
from common.elastic.host import Host, LocalHost, RemoteHost, StoppedError
from common.elastic.membership import RETRY_S, Membership, Report, Word
from common.elastic.wire import LOCAL, Channel, Ended, Hello, is_proof, prove
from common.record.exits import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED
from common.training.interruption import SIGNALS

ATTEMPTS = 3  # memberships in a row that break although nobody died
STRANGERS = 64  # connections that have not said Hello: of more the oldest is dropped


class Agent:
    """Runs the workers of one run to the end.

    own:         this host
    ranks:       number of ranks in the run
    first:       numbers of those that train from the start; all others join later
    per_worker:  how many ranks, numbered one after the other, are a worker
    per_host:    how many each host runs, numbered one after the other; further hosts wait to replace one
    patience_s:  seconds that the other members have to report after the first one did
    door:        where other hosts ask to be taken; None: there are none
    address:     of this host, as the others know it
    fingerprint: of the configuration, which other hosts must share
    start:       for which this process has claimed the run folder
    secret:      which they must know; empty: none
    """

    def __init__(
        self,
        own: LocalHost,
        ranks: int,
        first: Members,
        options: ElasticConfig,
        patience_s: float,
        *,
        per_worker: int = 1,
        per_host: int | None = None,
        door: socket.socket | None = None,
        address: str = LOCAL,
        fingerprint: str = "",
        start: str = "",
        secret: str = "",
    ) -> None:
        self._start = start
        self._own, self._door, self._address = own, door, address
        self._fingerprint, self._secret = fingerprint, secret
        self._options, self._patience_s = options, patience_s
        self._per_worker, self._per_host = per_worker, per_host or ranks
        self._hosts: list[Host | None] = [own] + [None] * (-(-ranks // self._per_host) - 1)
        self._guests: list[RemoteHost] = []  # hosts that have not said who they are, or wait to replace one
        self._to_start = set(range(ranks))  # when their host has come
        self._restarts = options.restarts
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
        self._passed_on = False  # to other hosts
        self._over = False  # a worker has come to the end, or the run is given up

    def run(self) -> int:
        """Start the workers, see them through, and return the exit code of the run."""
        former = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        code = FAILED
        try:
            if self._door is not None:
                self._door.setblocking(False)
                self._tell_place("this host", 0)
            self._fill()
            if missing := self._hosts.count(None):
                self._tell(f"waiting for {missing} of {len(self._hosts)} hosts")
            while any(host.running for host in self._present()) or (self._to_start and not self._over):
                self._turn()
            code = next((c for c in (FINISHED, INTERRUPTED, BAD_CONFIGURATION) if c in self._codes), FAILED)
        except StoppedError:
            code = INTERRUPTED
        finally:
            self._over = True
            self._own.end()
            for host in self._others():
                host.finish(code)
            if self._door is not None:
                self._door.close()
            for number, handler in former.items():
                signal.signal(number, handler)
        return code

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        # It looks around every now and then: for a signal, a stranger's silence, and what a host did not take yet.
        left = RETRY_S if self._deadline is None else min(RETRY_S, max(0.0, self._deadline - time.monotonic()))
        door = [] if self._door is None else [self._door]
        ready = wait(door + [handle for host in self._present() for handle in host.handles()], left)
        if self._stopping and not self._passed_on:
            self._stop()
        if self._door is not None and self._door in ready:
            self._admit(self._door)
        for host in self._present():
            for number, event in host.events(ready):
                match event:
                    case Hello() if isinstance(host, RemoteHost):
                        self._greet(host, event)
                    case Report():
                        self._hear(number, event)
                    case Ended():
                        self._bury(number, event.code)
        self._drop_lost_hosts()
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            for number in sorted(self._alive - self._reports.keys()):
                if number in self._alive:  # and not buried with another rank of its worker
                    self._tell(f"{self._name(number)} is silent for {self._patience_s:g} s and is killed")
                    self._host_of([number])[0].kill(number)
                    self._bury(number, -signal.SIGKILL)
        self._fill()
        if self._changing and not self._over and self._alive <= self._reports.keys():
            self._name_members()

    def _others(self) -> list[RemoteHost]:
        return self._guests + [host for host in self._hosts if isinstance(host, RemoteHost)]

    def _present(self) -> list[Host]:
        return [*self._guests, *(host for host in self._hosts if host is not None)]

    def _admit(self, door: socket.socket) -> None:
        """Accept a connection, which may be closed already."""
        try:
            self._guests.append(RemoteHost(Channel(door.accept()[0], self._patience_s)))
        except OSError:
            time.sleep(0.01)  # the door stays ready if this process has too many files open
        strangers = [guest for guest in self._guests if guest.name is None and not guest.gone]
        if len(strangers) > STRANGERS:
            strangers[0].drop()

    def _greet(self, host: RemoteHost, hello: Hello) -> None:
        name = hello.name if hello.name.isprintable() else ascii(hello.name)
        if not is_proof(hello.proof, self._secret, "host", host.nonce, hello.name, hello.fingerprint):
            self._tell(f"host {name[:100]} does not know ELASTIC_SECRET and is refused")
            host.refuse("the agent has another ELASTIC_SECRET")
        elif hello.fingerprint != self._fingerprint:
            self._tell(f"host {name[:100]} has another configuration and is refused")
            host.refuse("the agent runs another configuration")
        else:
            host.welcome(name[:100], prove(self._secret, "agent", host.their_nonce, host.nonce))
            if None not in self._hosts:
                self._tell(f"host {host.name} is spare")

    def _drop_lost_hosts(self) -> None:
        for host in self._others():
            if host.gone and host.name is not None and not self._over:
                spare = "spare " if host in self._guests else ""
                self._tell(f"{spare}host {host.name} {host.fate}")
        self._guests = [guest for guest in self._guests if not guest.gone]
        self._hosts = [None if isinstance(host, RemoteHost) and host.gone else host for host in self._hosts]

    def _fill(self) -> None:
        """Give places without a host the hosts that wait, and start the workers whose host is there."""
        for index, host in enumerate(self._hosts):
            waiting = [guest for guest in self._guests if guest.name is not None]
            if host is None and waiting:
                self._guests.remove(waiting[0])
                self._hosts[index] = waiting[0]
                self._tell_place(f"host {waiting[0].name}", index)
        for number in sorted(self._to_start):
            for host in self._host_of([number]):
                host.start(number)
                self._to_start.remove(number)

    def _host_of(self, numbers: Iterable[int]) -> list[Host]:
        """Return the hosts of these workers, as far as they are there."""
        hosts = (self._hosts[number // self._per_host] for number in numbers)
        return [host for host in hosts if host is not None]

    def _hear(self, number: int, report: Report) -> None:
        self._reports[number] = report
        if self._over:
            self._say(Word.OVER, {number})
        elif number in self._alive:
            self._begin_change(report.lost)
        elif not self._changing and self._joining():
            self._say(Word.WAITING, self._alive)

    def _begin_change(self, lost: bool) -> None:
        if not self._changing:
            self._changing = True
            self._deadline = time.monotonic() + self._patience_s
        if lost:
            self._store = None  # ends the waiting of those that connect
            self._say(Word.LOST, self._alive - self._reports.keys())

    def _bury(self, number: int, code: int) -> None:
        was_member = number in self._alive
        if code == INTERRUPTED and not was_member and not self._over:
            self._tell(f"{self._name(number)} leaves before it joined: its host was asked to stop")
            self._reports.pop(number, None)
            self._to_start.add(number)  # when another host takes the place of this one
            return
        self._codes.append(code)
        self._alive.discard(number)
        self._reports.pop(number, None)
        if code in (FINISHED, INTERRUPTED):
            self._over = True
            self._say(Word.OVER, set(self._reports))
            return
        if code == BAD_CONFIGURATION and self._number <= 0:  # it has said what is wrong
            self._end_all()
            return
        self._tell(f"{self._name(number)} died ({describe(code)})")
        if self._number < 0:
            self._end_all()
            return
        ranks = self._ranks_beside(number)
        for other in ranks - {number}:
            for host in self._host_of([other]):
                if other in host.running:
                    host.kill(other)
        self._alive -= ranks
        for rank in ranks:
            self._reports.pop(rank, None)
        if was_member:
            self._begin_change(lost=True)
        if self._restarts and not self._stopping and not self._over:
            self._restarts -= 1
            self._to_start |= ranks

    def _ranks_beside(self, number: int) -> set[int]:
        """Return the ranks of the worker to which this one belongs."""
        first = number // self._per_worker * self._per_worker
        return set(range(first, first + self._per_worker))

    def _joining(self) -> set[int]:
        """Return the ranks that wait to join, of workers of which all do."""
        waiting = self._reports.keys() - self._alive
        return {number for number in waiting if self._ranks_beside(number) <= waiting}

    def _name(self, number: int) -> str:
        worker, index = divmod(number, self._per_worker)
        return f"worker {worker}" + (f" (its rank {index})" if self._per_worker > 1 else "")

    def _name_members(self) -> None:
        """Start the next membership: the surviving members and the workers waiting to join."""
        reports = {number: self._reports[number] for number in sorted(self._alive)}
        holders = {number: report for number, report in reports.items() if report.members}
        first = self._number < 0  # joiners need a state to copy
        joining = set() if first else self._joining()
        lost = any(report.lost for report in reports.values())
        deaths = len(self._members) - len(self._alive)
        self._failures = self._failures + 1 if lost and not deaths else 0
        if not first and (not holders or self._failures > ATTEMPTS):
            self._tell("no worker is left that could go on")
            self._end_all()
            return
        few = 2 * len(self._alive) <= len(self._members) or len(self._alive | joining) < (
            (self._options.min_workers or 1) * self._per_worker
        )
        last = few and not first
        if last:
            left, before = (len(ranks) // self._per_worker for ranks in (self._alive, self._members))
            self._tell(f"{left} of {before} workers are left, too few: they save and stop")
        speakers = {number: report for number, report in holders.items() if number % self._per_worker == 0}
        newest = max(speakers.values(), key=lambda report: report.clock, default=Report())
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._number += 1
        self._members = tuple(sorted(self._alive if last else self._alive | joining))
        membership = Membership(
            number=self._number,
            members=self._members,
            before=newest.members,
            holders=tuple(holders),
            clock=newest.clock,
            dealing=newest.dealing,
            reports={number: (report.clock, report.merged) for number, report in speakers.items()},
            lost=lost,
            last=last,
            address=self._address,
            port=self._store.port,
            start=self._start,
        )
        self._alive, self._changing, self._deadline = set(self._members), False, None
        for number in self._members:
            del self._reports[number]
        self._say(membership, self._alive)
        if self._joining() and not last:
            self._say(Word.WAITING, self._alive)

    def _say(self, message: Membership | Word, numbers: Iterable[int]) -> None:
        for number in numbers:
            for host in self._host_of([number]):
                host.send(number, message)

    def _end_all(self) -> None:
        self._over = True
        self._to_start.clear()
        for host in self._present():
            for number in list(host.running):
                host.kill(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        first, self._stopping = not self._stopping, True
        if self._number < 0 and first and not self._over:
            raise StoppedError  # there is nothing to save yet, and starting a worker may take long
        self._own.signal(number)  # all workers agree to stop

    def _stop(self) -> None:
        """Pass a signal on to other hosts."""
        self._passed_on = True
        for host in self._others():
            host.stop()

    def _tell_place(self, host: str, index: int) -> None:
        """Say which workers a host runs."""
        first, beyond = (index * self._per_host // self._per_worker, (index + 1) * self._per_host // self._per_worker)
        self._tell(f"{host} runs " + (f"workers {first} to {beyond - 1}" if beyond > first + 1 else f"worker {first}"))

    @staticmethod
    def _tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


def describe(code: int) -> str:
    """Return what ended a process: the name of a signal, or its exit code."""
    known = {-number: number.name for number in signal.Signals}
    return known.get(code, f"exit code {code}")
