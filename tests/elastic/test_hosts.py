"""Runs on several hosts: one is lost and replaced, networks are cut, the leading one dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from common.experiments.definitions import ROOT
from scripts.emulate import EmulateArguments, Host, emulated_hosts, ip
from tests.elastic.test_processes import ENDLESS, PACED, RUN, assert_equals_replay, joined, trained
from tests.ports import free_port
from tests.scripts.namespaces import needs_namespaces
from tests.training.replay import membership_rows
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

LONG = ["workers.per_host=1", "training.batch_size=96", "training.steps=150", "parallel.timeout_s=20"]
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Kill what a failed test leaves."""
    yield
    for process in STARTED:
        process.kill()
    STARTED.clear()


def begin(folder: Path, agent: str, *arguments: str, host: Host | None = None) -> subprocess.Popen[str]:
    """Start the command of one host."""
    given = [PACED, f"elastic.agent={agent}", f"run_dir={folder}", *arguments]
    command = [sys.executable, "-m", "cnn.train", *RUN, *LONG, *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"GLOO_SOCKET_IFNAME": "eth0"} if host else {})
    command = host.command(*command) if host else command
    STARTED.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return STARTED[-1]


def end(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Wait for all; return their exit codes and what they said."""
    said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    return [process.returncode for process in processes], said


def test_a_lost_host_is_replaced_and_the_result_is_that_of_a_replay(tmp_path: Path) -> None:
    """Hosts of two workers; the fourth one comes when all places are taken."""
    folder, agent = tmp_path / "run", f"127.0.0.1:{free_port()}"
    arguments = ["workers.count=6", "workers.per_host=2", "elastic.restarts=2", ENDLESS]
    hosts = [begin(folder, agent, *arguments) for _ in range(3)]
    wait_for(lambda: any(is_listening(host.pid, agent) for host in hosts))
    leading = [is_listening(host.pid, agent) for host in hosts].index(True)
    lost = hosts[leading - 1]
    wait_for(trained(folder, 8))
    hosts.append(begin(folder, agent, *arguments))
    lost.kill()
    wait_for(lambda: joined(folder, 1)() or None not in [host.poll() for host in hosts])
    hosts[leading].send_signal(signal.SIGTERM)
    codes, _ = end(hosts)
    assert sorted(codes) == [-signal.SIGKILL, 75, 75, 75]
    assert membership_rows(folder)[-1]["members"] == [0, 1, 2, 3, 4, 5]
    assert_equals_replay(folder, *LONG, *arguments)


def is_listening(pid: int, address: str) -> bool:
    """Whether this process listens at this address."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(file))
    port = f"{int(address.partition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{line[9]}]" in sockets for line in lines if line[1].endswith(port) and line[3] == "0A")


def test_without_the_leading_host_all_save_and_stop(tmp_path: Path) -> None:
    folder, agent = tmp_path / "run", f"127.0.0.1:{free_port()}"
    leading = begin(folder, agent, "workers.count=3")
    wait_for(lambda: is_listening(leading.pid, agent))
    hosts = [leading, *(begin(folder, agent, "workers.count=3") for _ in range(2))]
    wait_for(trained(folder, 8))
    leading.kill()
    codes, said = end(hosts)
    assert codes == [-signal.SIGKILL, 75, 75]
    assert all(f"the agent at {agent} is gone: workers save and stop" in text for text in said[1:])
    assert list((folder / "checkpoints").glob("step_*/manifest.json"))


@needs_namespaces
def test_a_partition_leaves_only_the_majority(tmp_path: Path) -> None:
    """Of three hosts the last one no longer reaches the others."""
    folder = tmp_path / "run"
    with emulated_hosts(EmulateArguments(hosts=3, mbit_per_s=0)) as hosts:
        agent = f"{hosts[0].address}:29600"
        processes = [begin(folder, agent, "workers.count=3", host=host) for host in hosts]
        wait_for(trained(folder, 8))
        switch = hosts[0].namespace.rpartition("-")[0] + "-switch"
        ip("-n", switch, "link", "set", f"port{hosts[-1].number}", "down")
        codes, said = end(processes)
    assert codes == [0, 0, 75]
    assert "is gone: workers save and stop" in said[-1]
    (row,) = membership_rows(folder)
    assert len(row["members"]) == 2
    assert_equals_replay(folder, *LONG, "workers.count=3")
