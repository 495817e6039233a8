"""The protocol of agent and workers with real processes, which add numbers up in place of training."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from common.config.elastic import ElasticConfig
from common.elastic import membership
from common.elastic.agent import Agent
from common.elastic.host import LocalHost
from common.elastic.membership import DismissedError, Member, Membership, Notice, Report
from common.elastic.remote import RefusedError, RemoteHost, join, serve
from common.elastic.wire import LOCAL, Channel, Command, Ended, Hello, listen, receive, send
from common.parallel.collectives import sum_over_ranks
from common.parallel.making_groups import abort_groups, groups_of_members
from common.record import FAILED, FINISHED, INTERRUPTED
from common.training.interruption import Request
from common.training.stream import Dealing
from tests.distributed.processes import PRELOAD
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_for

TIMEOUT_S = 3000.0  # longer than any test may take: nothing below may wait for it

Deeds = Mapping[int, str]  # {membership: what a worker does in it}


def work(number: int, connection: Connection, deeds: Deeds, log: Path, groups: str, timeout_s: float) -> None:
    """Add up with the other members, until a deed is due."""
    member, report = Member(number, connection, groups_of_members(groups, number, torch.device("cpu"))), Report()
    while True:
        try:
            named = member.next(report)
        except DismissedError:
            os._exit(FINISHED)
        added = named.clock
        deed = deeds.get(named.number, "")
        if deed == "dies before it connects":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed.startswith("dies at key "):
            membership.dist.TCPStore = partial(MortalStore, int(deed.split()[-1]))
        lost, connected = True, False
        try:
            member.connect(named, timeout_s)
            connected = True
            with log.open("a") as file:
                file.write(json.dumps([named.number, list(named.members), list(named.holders), named.last]) + "\n")
            if named.last:
                os._exit(INTERRUPTED)
            while True:
                assert sum_over_ranks(torch.ones(1)) == len(named.members)
                added += 1
                if member.request() is Request.STOP:  # the test is gone
                    os._exit(INTERRUPTED)
                if added % 20 == 0 and sum_over_ranks(torch.tensor(float(member.request() is Request.CHANGE))):
                    lost = False
                    break
                match deed if added % 5 == 0 else "":
                    case "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stops":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "ends":
                        os._exit(FINISHED)
                    case "loses its links":
                        abort_groups()
                time.sleep(0.001)
        except RuntimeError:
            abort_groups()
        member.disconnect(lost)
        report = Report(named.members, added, lost=lost) if connected else report._replace(lost=True)


class MortalStore(dist.Store):
    """A store that kills its process after the given number of `set` calls."""

    def __init__(self, keys: int, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._left, self._store = keys, TCPStore(*arguments, **options)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)


def run(
    ranks: int,
    deeds: Mapping[int, list[Deeds]],
    log: Path,
    restarts: int = 0,
    timeout_s: float = TIMEOUT_S,
    groups: str = "new",
) -> tuple[int, dict[int, list]]:
    """Return the exit code, and {number: [members, holders, last]} of every membership that came about.

    deeds: of each rank, for its first start, the next, ...
    """
    options, first = ElasticConfig(min_workers=1, restarts=restarts), tuple(range(ranks))
    host = LocalHost(starting(deeds, log, groups, timeout_s))
    code = Agent(host, ranks, first, options, timeout_s).run()
    assert not multiprocessing.active_children()
    return code, memberships(log)


def memberships(log: Path) -> dict[int, list]:
    """Return {number: [members, holders, last]} of every membership that came about."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seen = {number: rest for number, *rest in lines}
    assert all(seen[number] == rest for number, *rest in lines)  # all agree
    return seen


def starting(
    deeds: Mapping[int, list[Deeds]], log: Path, groups: str = "new", timeout_s: float = TIMEOUT_S
) -> Callable[[int, Connection], BaseProcess]:
    """Return what starts workers; deeds: of each, for its first start here, the next, ..."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    starts = {number: iter(deeds[number]) for number in deeds}

    def start(number: int, connection: Connection) -> BaseProcess:
        own = next(starts.get(number, iter(())), {})
        return context.Process(target=work, args=(number, connection, own, log, groups, timeout_s))

    return start


def test_deaths_one_after_the_other_and_while_others_connect(groups: str, tmp_path: Path) -> None:
    deeds = {1: [{0: "dies"}], 3: [{1: "dies before it connects"}], 0: [{2: "ends"}]}
    code, seen = run(5, deeds, tmp_path / "log", groups=groups)
    assert code == FINISHED
    assert seen == {0: [[0, 1, 2, 3, 4], [], False], 2: [[0, 2, 4], [0, 2, 4], False]}


def test_a_dead_worker_is_replaced(groups: str, tmp_path: Path) -> None:
    """At once, where it is ready before the others have reported, or later, when these have stopped for it."""
    code, seen = run(3, {1: [{0: "dies"}, {1: "ends", 2: "ends"}]}, tmp_path / "log", restarts=1, groups=groups)
    assert code == FINISHED
    assert seen.pop(0) == [[0, 1, 2], [], False]
    assert seen.popitem()[1] == [[0, 1, 2], [0, 2], False]
    assert list(seen.values()) in ([], [[[0, 2], [0, 2], False]])


@pytest.mark.parametrize("keys", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_death_while_members_connect(keys: int, groups: str, tmp_path: Path) -> None:
    """With its first key a member says that it is there; with the second where the others can connect to it."""
    deeds = {2: [{0: "dies"}], 1: [{1: f"dies at key {keys}"}], 0: [dict.fromkeys(range(2, 9), "ends")]}
    code, seen = run(5, deeds, tmp_path / "log", timeout_s=20.0, groups=groups)
    assert code == FINISHED
    assert seen.pop(0) == [[0, 1, 2, 3, 4], [], False]
    assert seen.popitem()[1] == [[0, 3, 4], [0, 3, 4], False]
    assert list(seen.values()) in ([], [[[0, 1, 3, 4], [0, 1, 3, 4], False]])  # some may not have missed it at first


@pytest.mark.parametrize(
    ("answer", "reason"), [(None, "refused"), (b"", "no answer"), (b"SSH-2.0-OpenSSH\r\n", "OSError|ValueError")]
)
def test_where_no_agent_answers_a_host_says_so(answer: bytes | None, reason: str) -> None:
    """Nobody listens, somebody says nothing, or something else is said."""
    accepted = []

    def reply(server: socket.socket) -> None:
        accepted.append(server.accept()[0])
        accepted[0].sendall(answer or b"")

    with socket.create_server((LOCAL, 0)) as server:
        address = f"{LOCAL}:{server.getsockname()[1]}"
        if answer is None:
            server.close()
        else:
            threading.Thread(target=reply, args=(server,)).start()
        with pytest.raises(RefusedError, match=rf"{address}: expected the host that leads.*({reason})"):
            join(address, Hello("other", "this"), 0.3, TIMEOUT_S)
    for channel in accepted:
        channel.close()


def frame(*message: object) -> bytes:
    """A message as another host would send it, or a stranger."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4) + text


HELLO, REPORT = frame(-1, "Hello", ["other", "this"]), [[], 0, None, [0, 0, 0, 0.0, 0], False]
DEEP = (200_000).to_bytes(4) + b"[" * 200_000
STRANGERS = {
    "says nothing": b"",
    "two bytes": b"\r\n",
    "half a Hello": HELLO[:20],
    "no number": frame(float("inf"), "Hello", ["x", "y"]),
    "deep": DEEP,
    "another configuration": frame(-1, "Hello", ["x", "another"]),
    "unknown kind": frame(0, [], []),
    **{f"ends {number} with {code}": frame(number, "Ended", [code]) for number in (0, 999) for code in (0, -9, 75)},
    "reports": frame(999, "Report", REPORT),
    "another host's worker ends": HELLO + frame(0, "Ended", [0]),
    "another host's worker reports": HELLO + frame(0, "Report", REPORT),
    "nonsense after Hello": HELLO + b"GET / HTTP/1.0\r\n\r\n",
    "deep after Hello": HELLO + DEEP,
    "Hello twice": HELLO + HELLO,
}


def test_who_reaches_the_port_neither_ends_nor_blocks_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once; then a worker dies, which the agent must notice while they stay."""
    log, listener = tmp_path / "log", listen("127.0.0.1:0")
    assert listener is not None
    strangers, said = [], []
    monkeypatch.setattr(Agent, "_log", staticmethod(said.append))

    def disturb() -> None:
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
        for content in STRANGERS.values():
            strangers.append(socket.create_connection(listener.getsockname()))
            strangers[-1].sendall(content)
        wait_for(lambda: sum("is dropped" in sentence for sentence in said) == 5)
        os.kill(own._processes[2].pid, signal.SIGKILL)

    own = LocalHost(starting({0: [{1: "ends"}]}, log))
    thread = threading.Thread(target=disturb)
    thread.start()
    options = ElasticConfig(min_workers=1)
    assert Agent(own, 3, (0, 1, 2), options, TIMEOUT_S, listener=listener, fingerprint="this").run() == FINISHED
    thread.join()
    assert memberships(log) == {0: [[0, 1, 2], [], False], 1: [[0, 1], [0, 1], False]}
    assert any("spare host other does not speak as a host of this run does" in sentence for sentence in said)
    for stranger in strangers:
        stranger.close()


def test_a_host_that_takes_nothing_counts_as_lost_and_holds_nobody_up() -> None:
    server = socket.create_server((LOCAL, 0))
    theirs, ours = socket.create_connection(server.getsockname()), server.accept()[0]
    host = RemoteHost(Channel(ours, 0.2))
    host.accept("stopped", "")
    host.running = {0}
    for _ in range(200):
        host.send(0, Membership(1, tuple(range(9999)), (), (), 0, Dealing(0, 0, 0, 0.0), {}, True, False, LOCAL, 1))
    events: list = []
    while not events:  # what lies in the kernel's buffers counts as taken
        time.sleep(0.3)
        events = list(host.events([]))
    assert events == [(0, Ended(-signal.SIGKILL))]
    assert host.gone
    for channel in (server, theirs):
        channel.close()


@pytest.mark.parametrize(
    ("theirs", "reason"), [("", "another ELASTIC_SECRET"), ("b", "another ELASTIC_SECRET"), ("a", "")]
)
def test_a_host_proves_that_it_knows_the_secret(theirs: str, reason: str, tmp_path: Path) -> None:
    listener = listen("127.0.0.1:0")
    assert listener is not None
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    outcome: list[object] = []

    def other_side() -> None:
        try:
            outcome.append(join(address, Hello("other", "this"), 30.0, TIMEOUT_S, theirs))
        except RefusedError as error:
            outcome.append(str(error))

    agent = Agent(
        LocalHost(starting({}, tmp_path)),
        1,
        (0,),
        ElasticConfig(),
        9.0,
        listener=listener,
        fingerprint="this",
        secret="a",
    )
    agent._to_start.clear()
    thread = threading.Thread(target=other_side)
    thread.start()
    while thread.is_alive():
        agent._turn()
    thread.join()
    assert reason in outcome[0] if reason else not isinstance(outcome[0], str)
    listener.close()


def test_a_port_that_another_program_has_is_named_and_one_that_an_agent_has_is_not_taken() -> None:
    with socket.create_server((LOCAL, 0)) as other, pytest.raises(OSError, match="another program"):
        listen(f"{LOCAL}:{other.getsockname()[1]}")
    address = f"{LOCAL}:{free_port()}"
    with listen(address) or pytest.fail("nobody has it"):
        assert listen(address) is None
    assert listen("192.0.2.1:29500") is None
    for wildcard in ("0.0.0.0:29500", "[::]:29500"):
        with pytest.raises(ValueError, match="every host's"):
            listen(wildcard)
    with pytest.raises(OSError, match="is not the name or address of a host"):
        listen("no-such-host.invalid:29500")


@pytest.mark.parametrize("address", ["host", "host:0", "host:65536", "fd00::1:29500", ":29500", "[fd00::1]", "a b:1"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="a port from 1 to 65535"):
        ElasticConfig(agent=address)
    assert ElasticConfig(agent="[fd00::1]:29500").agent == "[fd00::1]:29500"


def signal_soon(number: signal.Signals) -> None:
    """Send a signal to this process shortly after it has begun to handle it."""
    former = signal.getsignal(number)

    def send_it() -> None:
        wait_for(lambda: signal.getsignal(number) != former)
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_it).start()


def test_a_signal_ends_a_host_that_waits_for_others(tmp_path: Path) -> None:
    """The leading one for others, another one for the agent."""
    listener = listen("127.0.0.1:0")
    (tmp_path / "log").touch()
    signal_soon(signal.SIGTERM)
    host = LocalHost(starting({}, tmp_path / "log"))
    agent = Agent(
        host, 2, (0, 1), ElasticConfig(min_workers=1), TIMEOUT_S, per_host=1, listener=listener, fingerprint="this"
    )
    assert agent.run() == INTERRUPTED
    signal_soon(signal.SIGTERM)
    assert serve(f"{LOCAL}:{free_port()}", host, Hello("other", "this"), TIMEOUT_S) == INTERRUPTED


def test_a_signal_ends_a_spare_host(tmp_path: Path) -> None:
    server = socket.create_server((LOCAL, 0))
    taken = threading.Event()

    def take() -> None:
        host = RemoteHost(Channel(server.accept()[0], TIMEOUT_S))
        host.accept("other", "")
        taken.wait(LIMIT_S)

    threading.Thread(target=take).start()
    signal_soon(signal.SIGTERM)
    address = f"{LOCAL}:{server.getsockname()[1]}"
    assert serve(address, LocalHost(starting({}, tmp_path)), Hello("other", "this"), TIMEOUT_S) == INTERRUPTED
    taken.set()
    server.close()


class IdleHost(LocalHost):
    """A host that only counts the workers it is to start."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda *_: pytest.fail("started"))
        self.name, self.started = name, []

    def start(self, number: int) -> None:
        self.started.append(number)


@pytest.mark.parametrize("stopping", [True, False])
def test_a_host_that_was_asked_to_stop_gets_no_more_workers(stopping: bool) -> None:
    own = IdleHost("own")
    agent = Agent(own, 2, (0,), ElasticConfig(), TIMEOUT_S)
    agent._to_start.clear()
    agent._stopping = stopping
    agent._on_exit(1, INTERRUPTED)
    agent._start_workers()
    assert (agent._to_start, own.started) == (({1}, []) if stopping else (set(), [1]))


@pytest.mark.parametrize(("members", "started"), [((0, 2), ([0], [2])), ((1, 2), ([1], [2]))])
def test_hosts_first_take_the_places_of_members(members: tuple[int, int], started: tuple[list[int], list[int]]) -> None:
    """Of a run of three hosts, two are left."""
    own, other = IdleHost("own"), IdleHost("other")
    agent = Agent(own, 3, members, ElasticConfig(), TIMEOUT_S, per_host=1)
    agent._pending = [other]
    agent._start_workers()
    assert (own.started, other.started) == started


@pytest.mark.parametrize("leads", ["1", ""])
def test_a_job_does_not_wait_for_ever_for_a_missing_node(tmp_path: Path, monkeypatch, capfd, leads: str) -> None:
    """Where somebody starts the hosts by hand, the leading one waits until a signal comes."""
    monkeypatch.setenv("ELASTIC_LEADS", leads)
    monkeypatch.setattr("common.elastic.agent.PATIENCE_S", 0.5)
    monkeypatch.setattr("common.elastic.membership.RETRY_S", 0.1)
    if not leads:
        signal_soon(signal.SIGTERM)
    host = LocalHost(starting({}, tmp_path / "log"))
    agent = Agent(host, 2, (0, 1), ElasticConfig(), TIMEOUT_S, per_host=1, listener=listen("127.0.0.1:0"))
    assert agent.run() == (FAILED if leads else INTERRUPTED)
    assert ("1 hosts have not come within 0.5 s" in capfd.readouterr().err) == bool(leads)


def test_a_worker_without_a_state_does_not_wait_after_a_signal() -> None:
    _, theirs = ends = Pipe()
    with pytest.raises(DismissedError, match="asked to stop"):
        Member(0, theirs).next(Report(), lambda: True)
    ends[0].close()


def test_messages_between_hosts_are_no_pickles() -> None:
    ours, theirs = Pipe()
    report = Report((0, 2), 7, None, Dealing(1, 2, 3, 0.1), lost=True)
    named = Membership(3, (0, 2), (0, 1, 2), (0,), 7, Dealing(1, 2, 3, 0.1), {0: (7, 2)}, True, False, "host", 5)
    for message in (report, named, Notice.LOST, Command.KILL, Ended(-9), Hello("name", "identity")):
        send(ours, 4, message)
        assert receive(theirs) == (4, message)
    ours.send(report)
    with pytest.raises(ValueError, match="decode"):
        receive(theirs)
    ours.send_bytes(b'[-1, "Hello", ["name", "identity", "\\ud800"]]')  # would be no proof, but an error where compared
    with pytest.raises(ValueError, match="surrogates"):
        receive(theirs)


def test_a_minority_saves_and_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, seen = run(2, {0: [{0: "dies"}]}, tmp_path / "log")
    assert code == INTERRUPTED
    assert next(reversed(seen.values()))[2] is True
    assert "too few: they save and stop" in capfd.readouterr().err


@pytest.mark.slow
def test_who_is_silent_is_killed_and_replaced_and_a_broken_link_needs_no_death(groups: str, tmp_path: Path) -> None:
    deeds = {1: [{0: "loses its links", 1: "stops"}], 2: [{1: "loses its links"}], 0: [{3: "ends"}]}
    code, seen = run(4, deeds, tmp_path / "log", timeout_s=15.0, restarts=1, groups=groups)
    assert code == FINISHED
    everybody = [0, 1, 2, 3]
    assert [seen[number][0] for number in seen] == [everybody, everybody, [0, 2, 3], everybody]


def test_a_worker_that_dies_before_training_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    code, seen = run(3, {2: [{0: "dies before it connects"}]}, tmp_path / "log", restarts=3)
    assert (code, seen) == (FAILED, {})


def test_without_its_agent_a_worker_wants_to_stop() -> None:
    ours, theirs = Pipe()
    member = Member(0, theirs)
    assert member.request() is Request.NOTHING
    ours.close()
    with pytest.raises(DismissedError, match="agent has died"):
        member.next(Report())
    assert member.request() is Request.STOP
