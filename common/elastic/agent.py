"""The agent of a run that survives the loss of workers: it has them started, notices deaths, decides who trains.

It keeps track of processes, the ranks of workers; a worker that loses a rank is lost as a whole.

The agent is the launching process of the first host and does not train. A run has a single agent, so workers cannot
disagree about the members; if it dies, all workers save and stop. It notices deaths at once, through the
operating system of their host; the loss of a host, and silence, after `parallel.timeout_s`.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from types import FrameType

import torch.distributed as dist

from common.config.elastic import ElasticConfig, Ranks
from common.elastic.host import LocalHost, StoppedError
from common.elastic.membership import RETRY_S, Membership, Notice, Report
from common.elastic.remote import PATIENCE_S, RemoteHost
from common.elastic.wire import LOCAL, Channel, Ended, Hello, is_proof, prove
from common.record import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED
from common.training.signals import SIGNALS

ATTEMPTS = 3  # memberships in a row that may break although no rank died
MOST_UNKNOWN = 64  # connections that have not said Hello; if there are more, the oldest is dropped

Host = LocalHost | RemoteHost


class Agent:
    """Runs the workers of one run to the end.

    own:         this host
    ranks:       number of ranks in the run
    first:       ranks that train from the start; all others join later
    per_worker:  number of consecutive ranks that form a worker
    per_host:    number of consecutive ranks that each host runs; further hosts wait to replace one
    timeout_s:   within which the other members have to report after the first one did
    listener:    where other hosts connect; None: there are none
    address:     of this host, as the others know it
    fingerprint: of the configuration, which other hosts must share
    start:       the start for which this process has claimed the run folder
    secret:      a secret that other hosts must know; empty: none
    """

    def __init__(
        self,
        own: LocalHost,
        ranks: int,
        first: Ranks,
        options: ElasticConfig,
        timeout_s: float,
        *,
        per_worker: int = 1,
        per_host: int | None = None,
        listener: socket.socket | None = None,
        address: str = LOCAL,
        fingerprint: str = "",
        start: str = "",
        secret: str = "",
    ) -> None:
        self._own, self._listener, self._address = own, listener, address
        self._fingerprint, self._secret = fingerprint, secret
        self._start, self._options, self._timeout_s = start, options, timeout_s
        self._per_worker, self._per_host = per_worker, per_host or ranks
        places, needed = range(-(-ranks // self._per_host)), {number // self._per_host for number in first}
        self._places = sorted(places, key=lambda place: place not in needed)  # in the order in which hosts take them
        self._hosts: list[Host | None] = [own if place == self._places[0] else None for place in places]
        self._pending: list[RemoteHost] = []  # hosts that have not said who they are, or wait to replace one
        self._to_start = set(range(ranks))  # once their host has connected
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
        self._forwarded = False  # to other hosts
        self._over = False  # a worker has reached the end, or the run is given up

    def run(self) -> int:
        """Start the workers, see them through, and return the exit code of the run."""
        former = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        code = FAILED
        try:
            if self._listener is not None:
                self._listener.setblocking(False)
                self._log_workers("this host", self._hosts.index(self._own))
            self._start_workers()
            if missing := self._hosts.count(None):
                self._log(f"waiting for {missing} of {len(self._hosts)} hosts")
            give_up = time.monotonic() + (PATIENCE_S if os.environ.get("ELASTIC_LEADS") == "1" else float("inf"))
            while any(host.running for host in self._all_hosts()) or (self._to_start and not self._over):
                self._turn()
                if self._number < 0 and None in self._hosts and time.monotonic() > give_up:
                    self._log(f"{self._hosts.count(None)} hosts have not come within {PATIENCE_S:g} s")
                    self._kill_all()
            code = next((c for c in (FINISHED, INTERRUPTED, BAD_CONFIGURATION) if c in self._codes), FAILED)
        except StoppedError:
            code = INTERRUPTED
        finally:
            self._over = True
            self._own.end()
            for host in self._remote_hosts():
                host.finish(code)
            if self._listener is not None:
                self._listener.close()
            for number, handler in former.items():
                signal.signal(number, handler)
        return code

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        # Not for long: signals, silent pending hosts and messages not yet sent need attention as well.
        left = RETRY_S if self._deadline is None else min(RETRY_S, max(0.0, self._deadline - time.monotonic()))
        listener = [] if self._listener is None else [self._listener]
        ready = wait(listener + [handle for host in self._all_hosts() for handle in host.handles()], left)
        if self._stopping and not self._forwarded:
            self._forwarded = True
            for host in self._remote_hosts():
                host.stop()
        if self._listener is not None and self._listener in ready:
            self._accept(self._listener)
        for host in self._all_hosts():
            for number, event in host.events(ready):
                match event:
                    case Hello() if isinstance(host, RemoteHost):
                        self._on_hello(host, event)
                    case Report():
                        self._on_report(number, event)
                    case Ended():
                        self._on_exit(number, event.code)
        self._drop_lost_hosts()
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            for number in sorted(self._alive - self._reports.keys()):
                if number in self._alive:  # and not killed with another rank of its worker
                    self._log(f"{self._name(number)} is silent for {self._timeout_s:g} s and is killed")
                    self._host_of([number])[0].kill(number)
                    self._on_exit(number, -signal.SIGKILL)
        self._start_workers()
        if self._changing and not self._over and self._alive <= self._reports.keys():
            self._begin_membership()

    def _remote_hosts(self) -> list[RemoteHost]:
        return self._pending + [host for host in self._hosts if isinstance(host, RemoteHost)]

    def _all_hosts(self) -> list[Host]:
        return [*self._pending, *(host for host in self._hosts if host is not None)]

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, which may be closed already."""
        try:
            self._pending.append(RemoteHost(Channel(listener.accept()[0], self._timeout_s)))
        except OSError:
            time.sleep(0.01)  # the listener stays ready if this process has too many files open
        unknown = [host for host in self._pending if host.name is None and not host.gone]
        if len(unknown) > MOST_UNKNOWN:
            unknown[0].drop()

    def _on_hello(self, host: RemoteHost, hello: Hello) -> None:
        name = hello.name if hello.name.isprintable() else ascii(hello.name)
        if not is_proof(hello.proof, self._secret, "host", host.nonce, hello.name, hello.fingerprint):
            self._log(f"host {name[:100]} does not know ELASTIC_SECRET and is refused")
            host.refuse("the agent has another ELASTIC_SECRET")
        elif hello.fingerprint != self._fingerprint:
            self._log(f"host {name[:100]} has another configuration and is refused")
            host.refuse("the agent runs another configuration")
        else:
            host.accept(name[:100], prove(self._secret, "agent", host.their_nonce, host.nonce))
            if None not in self._hosts:
                self._log(f"host {host.name} is spare")

    def _drop_lost_hosts(self) -> None:
        for host in self._remote_hosts():
            if host.gone and host.name is not None and not self._over:
                spare = "spare " if host in self._pending else ""
                self._log(f"{spare}host {host.name} {host.why_gone}")
        self._pending = [host for host in self._pending if not host.gone]
        self._hosts = [None if isinstance(host, RemoteHost) and host.gone else host for host in self._hosts]

    def _start_workers(self) -> None:
        """Fill places without a host with the hosts that wait, and start the workers whose host is connected."""
        for index in self._places:
            waiting = [other for other in self._pending if other.name is not None]
            if self._hosts[index] is None and waiting:
                self._pending.remove(waiting[0])
                self._hosts[index] = waiting[0]
                self._log_workers(f"host {waiting[0].name}", index)
        for number in sorted(self._to_start):
            for host in (host for host in self._host_of([number]) if not host.leaving):
                host.start(number)
                self._to_start.remove(number)

    def _host_of(self, numbers: Iterable[int]) -> list[Host]:
        """Return the hosts of these ranks that are connected."""
        hosts = (self._hosts[number // self._per_host] for number in numbers)
        return [host for host in hosts if host is not None]

    def _on_report(self, number: int, report: Report) -> None:
        self._reports[number] = report
        if self._over:
            self._send(Notice.OVER, {number})
        elif number in self._alive:
            self._begin_change(report.lost)
        elif not self._changing and self._joining():
            self._send(Notice.WAITING, self._alive)

    def _begin_change(self, lost: bool) -> None:
        if not self._changing:
            self._changing = True
            self._deadline = time.monotonic() + self._timeout_s
        if lost:
            self._store = None  # ends the wait of connecting ranks
            self._send(Notice.LOST, self._alive - self._reports.keys())

    def _on_exit(self, number: int, code: int) -> None:
        was_member = number in self._alive
        if code == INTERRUPTED and not was_member and not self._over:
            self._log(f"{self._name(number)} leaves before it joined, as it was asked to")
            self._reports.pop(number, None)
            (host,) = self._host_of([number])
            host.leaving = self._stopping or host is not self._own
            self._to_start.add(number)  # when another host takes the place of this one
            return
        self._codes.append(code)
        self._alive.discard(number)
        self._reports.pop(number, None)
        if code in (FINISHED, INTERRUPTED):
            self._over = True
            self._send(Notice.OVER, set(self._reports))
            return
        if code == BAD_CONFIGURATION and self._number <= 0:  # it has said what is wrong
            self._kill_all()
            return
        self._log(f"{self._name(number)} died ({describe(code)})")
        if self._number < 0:
            self._kill_all()
            return
        ranks = self._ranks_of_worker(number)
        for other in ranks - {number}:
            for host in (host for host in self._host_of([other]) if other in host.running):
                host.kill(other)
        self._alive -= ranks
        for rank in ranks:
            self._reports.pop(rank, None)
        if was_member:
            self._begin_change(lost=True)
        if self._restarts and not self._stopping and not self._over:
            self._restarts -= 1
            self._to_start |= ranks

    def _ranks_of_worker(self, number: int) -> set[int]:
        """Return the ranks of the worker to which this rank belongs."""
        first = number // self._per_worker * self._per_worker
        return set(range(first, first + self._per_worker))

    def _joining(self) -> set[int]:
        """Return the ranks that wait to join, of workers whose ranks are all waiting."""
        waiting = self._reports.keys() - self._alive
        return {number for number in waiting if self._ranks_of_worker(number) <= waiting}

    def _name(self, number: int) -> str:
        worker, index = divmod(number, self._per_worker)
        return f"worker {worker}" + (f" (its rank {index})" if self._per_worker > 1 else "")

    def _begin_membership(self) -> None:
        """Start the next membership: of the surviving members and the ranks that wait to join."""
        reports = {number: self._reports[number] for number in sorted(self._alive)}
        holders = {number: report for number, report in reports.items() if report.members}
        first = self._number < 0  # joiners need a state to copy
        joining = set() if first else self._joining()
        lost = any(report.lost for report in reports.values())
        deaths = len(self._members) - len(self._alive)
        self._failures = self._failures + 1 if lost and not deaths else 0
        if not first and (not holders or self._failures > ATTEMPTS):
            self._log("no worker is left that could go on")
            self._kill_all()
            return
        fewest = (self._options.min_workers or 1) * self._per_worker
        last = not first and (2 * len(self._alive) <= len(self._members) or len(self._alive | joining) < fewest)
        if last:
            left, before = (len(ranks) // self._per_worker for ranks in (self._alive, self._members))
            self._log(f"{left} of {before} workers are left, too few: they save and stop")
        first_ranks = {number: report for number, report in holders.items() if number % self._per_worker == 0}
        newest = max(first_ranks.values(), key=lambda report: report.clock, default=Report())
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._number += 1
        self._members = Ranks(tuple(sorted(self._alive if last else self._alive | joining)))
        membership = Membership(
            number=self._number,
            members=self._members,
            before=newest.members,
            holders=Ranks(tuple(holders)),
            clock=newest.clock,
            dealing=newest.dealing,
            reports={number: (report.clock, report.merged) for number, report in first_ranks.items()},
            lost=lost,
            last=last,
            address=self._address,
            port=self._store.port,
            start=self._start,
        )
        self._alive, self._changing, self._deadline = set(self._members), False, None
        for number in self._members:
            del self._reports[number]
        self._send(membership, self._alive)
        if self._joining() and not last:
            self._send(Notice.WAITING, self._alive)

    def _send(self, message: Membership | Notice, numbers: Iterable[int]) -> None:
        for number in numbers:
            for host in self._host_of([number]):
                host.send(number, message)

    def _kill_all(self) -> None:
        self._over = True
        self._to_start.clear()
        for host in self._all_hosts():
            for number in list(host.running):
                host.kill(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self._stopping = not self._stopping, True
        if self._number < 0 and first and not self._over:
            raise StoppedError  # there is nothing to save yet, and starting a worker may take long
        self._own.signal(number)  # all workers agree to stop

    def _log_workers(self, host: str, index: int) -> None:
        """Say which workers a host runs."""
        first, beyond = (index * self._per_host // self._per_worker, (index + 1) * self._per_host // self._per_worker)
        self._log(f"{host} runs " + (f"workers {first} to {beyond - 1}" if beyond > first + 1 else f"worker {first}"))

    @staticmethod
    def _log(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


def describe(code: int) -> str:
    """Return what ended a process: the name of a signal, or its exit code."""
    return {-number: number.name for number in signal.Signals}.get(code, f"exit code {code}")
