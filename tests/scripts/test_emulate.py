"""Emulated hosts: bytes and rates are real, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import UsageError
from common.experiments.definitions import ROOT
from scripts import emulate
from tests.scripts.namespaces import needs_namespaces
from tests.waiting import LIMIT_S, wait_for

# Rank 0 sends 4 bytes, then 2 MB to rank 1 and gets 4 bytes back, REPEATS times; prints the seconds of the fastest.
REPEATS = 3
SEND = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
back = torch.ones(1)
for x in torch.ones(1), torch.ones(500_000):
    seconds = []
    for _ in range({REPEATS}):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(back, 1)
        else:
            dist.recv(x, 0)
            dist.send(back, 0)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(min(seconds), flush=True)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts.emulate", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    with start(*arguments) as process:
        output = process.communicate(timeout=LIMIT_S)
    assert made_by(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def made_by(pid: int) -> list[str]:
    return [name for name in emulate.existing() if name.startswith(f"gossip-{pid}-")]


# The first argument is the address of the receiver, who answers when all has come; the sender prints the seconds.
RECEIVER = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(65536):
        pass
    connection.send(b".")
"""
SENDER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
start = time.perf_counter()
connection.sendall(bytes(2_000_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - start)
"""


@needs_namespaces
def test_a_link_has_its_rate_and_counts_its_bytes() -> None:
    with emulate.emulated_hosts(emulate.EmulateArguments(hosts=2, mbit_per_s=80)) as (first, second):
        receive = second.command(sys.executable, "-c", RECEIVER, second.address)
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            before = first.statistics()[0], second.statistics()[1]
            seconds = float(emulate.call(*first.command(sys.executable, "-c", SENDER, second.address)).stdout)
            sent, received = first.statistics()[0] - before[0], second.statistics()[1] - before[1]
    assert (2e6 - 4 * emulate.packet_bytes(80)) * 8 / 80e6 <= seconds < 2 * 2e6 * 8 / 80e6
    assert 2e6 < received < 2e6 * 1.06  # headers, handshakes
    assert 2e6 < sent < 2e6 * 1.06


@pytest.mark.slow
@needs_namespaces
def test_bytes_rate_and_delay_are_real(tmp_path: Path) -> None:
    mbit_per_s, delay_ms = 20, 30
    program = tmp_path / "send.py"
    program.write_text(SEND)
    done = run("hosts=2", f"mbit_per_s={mbit_per_s}", f"delay_ms={delay_ms}", f"run={program}")
    if "this kernel has no sch_netem" in done.stderr and not shutil.which("iptables"):
        pytest.skip("a delay needs sch_netem or iptables")  # make env installs it where it can
    assert done.returncode == 0, done.stderr
    sent = [line for line in done.stderr.splitlines() if line.startswith("host ")]
    megabytes = float(sent[0].split("sent ")[1].split()[0])
    assert 2.0 < megabytes / REPEATS < 2.0 * 1.06  # headers, handshakes
    round_trip, seconds = map(float, done.stdout.split())
    bits_per_s = mbit_per_s * 1e6
    # No faster than the token bucket and the delay allow, and not much slower.
    assert round_trip >= 2 * delay_ms / 1000
    assert seconds >= (2e6 - 4 * emulate.packet_bytes(mbit_per_s)) * 8 / bits_per_s + 2 * delay_ms / 1000
    assert seconds < 2 * 2e6 * 8 / bits_per_s + 10 * 2 * delay_ms / 1000


@pytest.mark.slow
@needs_namespaces
def test_a_failing_program_fails_and_everything_is_removed(tmp_path: Path) -> None:
    program = tmp_path / "fail.py"
    program.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(3000)\n")
    done = run("hosts=2", f"run={program}")
    assert done.returncode != 0


@pytest.mark.slow
@needs_namespaces
def test_a_signal_ends_the_program_and_removes_everything(tmp_path: Path) -> None:
    program = tmp_path / "wait.py"
    program.write_text(f"import time\nopen('{tmp_path}/started', 'w')\ntime.sleep(3000)\n")
    process = start("hosts=2", f"run={program}")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert made_by(process.pid) == []
    left = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@needs_namespaces
@pytest.mark.parametrize("function", ["connect", "limit"])
def test_a_failing_set_up_leaves_nothing(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(emulate, function)

    def fail(*arguments: object) -> None:
        assert made_by(os.getpid())
        original(*arguments)
        raise UsageError("no more")

    monkeypatch.setattr(emulate, function, fail)
    with pytest.raises(UsageError, match="no more"), emulate.emulated_hosts(emulate.EmulateArguments(hosts=2)):
        pytest.fail("hosts came up")
    assert made_by(os.getpid()) == []


@needs_namespaces
def test_signals_wait_while_hosts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = emulate.call

    def interrupted(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        if command[:3] == ("ip", "netns", "del"):
            signal.raise_signal(signal.SIGINT)
        return call(*command, check=check)

    monkeypatch.setattr(emulate, "call", interrupted)
    with pytest.raises(KeyboardInterrupt), emulate.emulated_hosts(emulate.EmulateArguments(hosts=2)):
        assert len(made_by(os.getpid())) == 3
    assert made_by(os.getpid()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_namespaces
def test_down_removes_only_what_a_dead_process_made() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, used, mine = f"gossip-{dead.pid}-0123abcd-1", f"gossip-{os.getpid()}-0123abcd-switch", "gossip-mine"
    names = [left, used, mine, f"{left}-not", "somebody-elses"]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        inside = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "100"])
        wait_for(lambda: str(inside.pid) in emulate.ip("netns", "pids", left).split())
        done = run("--down")
        assert done.returncode == 0
        assert inside.wait(LIMIT_S) == -signal.SIGKILL
        assert set(names) - set(emulate.existing()) == {left}
        assert f"left alone {used}: process {os.getpid()} is running\n" in done.stdout
        assert f"left alone {mine}: not made by this script\n" in done.stdout
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(("arguments", "message"), [([], "run=...: missing"), (["hosts=100", "run=x.py"], "hosts=100")])
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert emulate.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_root_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert emulate.main(["run=x.py"]) == 2
    assert "run it as root" in capsys.readouterr().err
