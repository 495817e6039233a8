"""Hosts that are network namespaces of this machine: their cables, rates, delays and removal.

Packets travel through a bridge between the hosts; both directions are limited at the host's end.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cli import UsageError

PREFIX = "gossip-"  # of the namespaces' names
NAME = re.compile(rf"{PREFIX}(?P<maker>\d+)-[0-9a-f]{{8}}-(\d+|switch)")  # maker: id of the process
NETWORK = "10.77.0"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Host:
    """An emulated host; its interface eth0 has the address 10.77.0.<number>."""

    number: int
    namespace: str

    @property
    def address(self) -> str:
        """IPv4 address."""
        return f"{NETWORK}.{self.number}"

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` in this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def statistics(self) -> tuple[int, int]:
        """Return (bytes sent, bytes received) by the interface since it exists, headers included."""
        # /sys belongs to the namespace that mounted it; /proc/net does not.
        lines = ip("netns", "exec", self.namespace, "cat", "/proc/net/dev").splitlines()
        values = next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()
        return int(values[8]), int(values[0])


def connect(host: Host, switch: str) -> None:
    """Connect the host's eth0 with a port of the bridge."""
    port = f"port{host.number}"
    ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", host.namespace, "link", "set", "eth0", "up")
    # BBR, the default of some kernels, probes for a rate; behind a token bucket it never finds it.
    call(*host.command("sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"), check=False)


def limit(namespace: str, device: str, mbit_per_s: float) -> None:
    """Limit a device's rate by a token bucket with a queue of 4 MB; no limit for 0.

    What fits into the bucket leaves a device that was idle at once, so the bucket is small: two packets as segmentation
    offload merges them, which are as large as 1 ms of the rate, within bounds.
    """
    if mbit_per_s:
        packet = packet_bytes(mbit_per_s)
        bucket = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", str(2 * packet), "limit", "4000000"]
        ip("-n", namespace, "link", "set", device, "gso_max_size", str(packet))
        ip("netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *bucket)


def packet_bytes(mbit_per_s: float) -> int:
    """Return the size to which segmentation offload merges packets on a link of this rate, in bytes."""
    return round(min(max(mbit_per_s * 1e6 / 8 * 0.001, 4096), 65_536))


@contextlib.contextmanager
def delayed(hosts: Sequence[Host], delay_ms: float, rates: Mapping[int, float]) -> Iterator[None]:
    """Delay every packet between hosts: by the kernel's netem, else by delay.c."""
    first = hosts[0].namespace
    netem = ["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{delay_ms}ms", "limit", "20000"]
    if call("ip", "netns", "exec", first, *netem, check=False).returncode == 0:
        for host in hosts:
            rate = ["rate", f"{rates[host.number]}mbit"] if rates[host.number] else []
            call(*host.command(*netem, *rate))
        yield
        return
    limit(first, "eth0", rates[1])
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("iptables") is None:
        raise UsageError("delay_ms: this kernel has no sch_netem; expected iptables and a C compiler in its place")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/delay"
        call(compiler, "-O2", "-o", program, str(Path(__file__).with_name("delay.c")))
        names = [host.namespace for host in hosts]
        process = subprocess.Popen([program, str(round(1000 * delay_ms)), *names], stdout=subprocess.PIPE, text=True)
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise UsageError("delay_ms: this kernel has neither sch_netem nor NFQUEUE")
            # Where packets arrive: TCP stops sending while packets that wait where they leave seem not to have left.
            # Before all that computes: a packet must not wait for a core.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(10))
            queue = ["iptables", "-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0"]
            for host in hosts:
                call(*host.command(*queue, "--queue-bypass"))
            yield
        finally:
            process.terminate()
            process.wait(10)


def remove(namespaces: Sequence[str]) -> None:
    """End all processes in these namespaces and delete them, with cables, limits and rules."""
    with undisturbed():
        for name in namespaces:
            for pid in call("ip", "netns", "pids", name, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            call("ip", "netns", "del", name, check=False)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back signals that would end this process until the block is done."""
    waiting: list[int] = []
    handlers = {number: signal.signal(number, lambda n, _: waiting.append(n)) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in waiting:
            signal.raise_signal(number)


def leftovers() -> list[str]:
    """Return the names of namespaces whose maker is gone."""
    matches = [match for name in existing() if (match := NAME.fullmatch(name))]
    return [match.string for match in matches if not Path(f"/proc/{match['maker']}").exists()]


def existing() -> list[str]:
    """Return the names of all network namespaces."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def ip(*arguments: str) -> str:
    """Run iproute2's ip and return its output."""
    return call("ip", *arguments).stdout


def call(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a system command out of reach of a terminal's Ctrl-C. Raises UsageError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    if check and done.returncode:
        raise UsageError(f"{shlex.join(command)}: {' '.join(done.stderr.split())}")
    return done
