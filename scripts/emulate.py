"""Run a program on emulated hosts: network namespaces of this machine with a real rate limit and delay between them.

python -m scripts.emulate hosts=4 ranks_per_host=2 mbit_per_s=200 delay_ms=1 run="-m cnn.train experiment=quickstart"

Every host gets one torchrun with `ranks_per_host` processes, as nodes of a cluster do; `run` is what follows after
`torchrun`. Everything is removed at the end, even after a failure or a signal; --down removes what killed commands left
behind: the namespaces' names contain the id of the process that made them. It needs root, iproute2 (ip, tc) and, where
the kernel has no sch_netem, iptables and a C compiler for the delay. A host sends and receives `mbit_per_s` at the same
time.

Packets travel through a bridge between the hosts; both directions are limited at the host's end.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, UsageError, main_function, parse, words_of

MODULE = "scripts.emulate"
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


class EmulateArguments(Arguments):
    """Command line of scripts.emulate."""

    hosts: PositiveInt = Field(4, le=60, description="number of emulated hosts")
    ranks_per_host: PositiveInt = Field(1, description="processes per host")
    mbit_per_s: NonNegativeFloat = Field(1000, description="link rate of each host, in either direction; 0: no limit")
    delay_ms: NonNegativeFloat = Field(0, description="one-way delay of every packet")
    limit_s: PositiveFloat = Field(600, description="time limit of the program in seconds")
    run: Text | None = Field(None, description="arguments of torchrun: -m MODULE ... or FILE ...")
    down: bool = Field(False, description="only remove what killed commands left behind")


@main_function
def main(argv: Sequence[str]) -> int:
    """Bring the hosts up, run the program, remove the hosts; return the program's worst exit code."""
    arguments = parse(EmulateArguments, argv, MODULE, "Run a program on emulated hosts.")
    check_machine()
    if arguments.down:
        gone = leftovers()
        remove(gone)
        print(f"removed {len(gone)} namespaces")
        for name in existing():
            if name.startswith(PREFIX):
                match = NAME.fullmatch(name)
                reason = f"process {match['maker']} is running" if match else "not made by this script"
                print(f"left alone {name}: {reason}")
        return 0
    if arguments.run is None:
        raise UsageError('run=...: missing; expected what torchrun gets, such as run="-m cnn.train seed=1"')
    program = words_of("run", arguments.run)
    end_like_an_interruption()
    with emulated_hosts(arguments) as hosts:
        before = [host.statistics() for host in hosts]
        code = run_on(hosts, arguments.ranks_per_host, program, arguments.limit_s)
        for host, at_start in zip(hosts, before, strict=True):
            sent, received = (now - then for now, then in zip(host.statistics(), at_start, strict=True))
            print(f"host {host.number}: sent {sent / 1e6:.3f} MB, received {received / 1e6:.3f} MB", file=sys.stderr)
    return code


def end_like_an_interruption() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that hosts are removed after them too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def check_machine() -> None:
    """Raise UsageError if this machine cannot emulate hosts."""
    if os.geteuid() != 0:
        raise UsageError("emulated hosts are network namespaces: run it as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed (Debian: iproute2)")


@contextlib.contextmanager
def emulated_hosts(arguments: EmulateArguments) -> Iterator[list[Host]]:
    """Bring up hosts on one bridge; afterwards remove them and end all processes in them."""
    stem = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}-"
    switch, rate = f"{stem}switch", arguments.mbit_per_s
    hosts = [Host(number, f"{stem}{number}") for number in range(1, arguments.hosts + 1)]
    made: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(remove, made)
        for name in (switch, *(host.namespace for host in hosts)):
            with undisturbed():
                ip("netns", "add", name)
                made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            connect(host, switch)
            limit(switch, f"port{host.number}", rate)  # what it receives
            limit(host.namespace, "eth0", rate)  # what it sends
        if arguments.delay_ms:
            stack.enter_context(delayed(hosts, arguments.delay_ms, rate))
        yield hosts


def run_on(hosts: Sequence[Host], ranks_per_host: int, program: Sequence[str], limit_s: float) -> int:
    """Run one torchrun on each host; return the worst exit code, 124 after limit_s. If one fails, all are ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    launcher += [f"--nproc-per-node={ranks_per_host}", f"--master-addr={hosts[0].address}", "--master-port=29500"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Hide harmless warnings: addresses have no names here, and the last launcher finds the first one gone.
    for name, value in {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}.items():
        environment.setdefault(name, value)
    processes = [
        subprocess.Popen(host.command(*launcher, f"--node-rank={index}", *program), env=environment)
        for index, host in enumerate(hosts)
    ]
    end = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes):
            codes = [process.poll() for process in processes]
            if any(codes):  # neither None nor 0
                break
            if time.monotonic() > end:
                print(f"error: not finished within limit_s={limit_s:g} s", file=sys.stderr)
                return 124
            time.sleep(0.1)
        deadline = time.monotonic() + 30  # the others usually notice on their own
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
        return max((abs(process.poll() or 0) for process in processes), default=0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(35)


# -- network namespaces


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

    An idle device sends as much as fits into the bucket at once, so the bucket is small: two packets as merged by
    segmentation offload, each as large as 1 ms at this rate, within bounds.
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
def delayed(hosts: Sequence[Host], delay_ms: float, mbit_per_s: float) -> Iterator[None]:
    """Delay every packet between hosts: by the kernel's netem, else by delay.c."""
    first = hosts[0].namespace
    netem = ["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{delay_ms}ms", "limit", "20000"]
    if call("ip", "netns", "exec", first, *netem, check=False).returncode == 0:
        rate = ["rate", f"{mbit_per_s}mbit"] if mbit_per_s else []
        for host in hosts:
            call(*host.command(*netem, *rate))
        yield
        return
    limit(first, "eth0", mbit_per_s)
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
            # Delay packets where they arrive: while they wait where they leave, TCP takes them for unsent and stops.
            # Run before everything that computes: a packet must not wait for a core.
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


if __name__ == "__main__":
    sys.exit(main())
