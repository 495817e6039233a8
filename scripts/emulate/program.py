"""Run a program on emulated hosts: network namespaces of this machine with a real rate limit and delay between them.

python -m scripts.emulate hosts=4 ranks_per_host=2 mbit_per_s=200 delay_ms=1 run="-m cnn.train experiment=quickstart"

Every host gets one torchrun with `ranks_per_host` processes, as nodes of a cluster do; `run` is what follows after
`torchrun`. slow=2@50 gives host 2 another rate. Everything is removed at the end, also after a failure or a signal;
--down removes what killed commands left behind: the namespaces' names contain the id of the process that made them. It
needs root, iproute2 (ip, tc) and, where the kernel has no sch_netem, iptables and a C compiler for the delay. A host
sends and receives `mbit_per_s` at the same time.

compute_ms=100 puts waits into the layers of the model that a task trains (slowed.py), as if each rank had an
accelerator; condition=slow_host, jitter_30 or stalls makes them uneven. engine=decent_dp lets decent-dp train it.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, UsageError, main_function, parse, words_of
from common.planner.conditions import CONDITIONS
from scripts.emulate.namespaces import (
    NAME,
    PREFIX,
    Host,
    connect,
    delayed,
    existing,
    ip,
    leftovers,
    limit,
    remove,
    undisturbed,
)

MODULE = "scripts.emulate"


class EmulateArguments(Arguments):
    """Command line of scripts.emulate."""

    hosts: PositiveInt = Field(4, le=60, description="emulated hosts")
    ranks_per_host: PositiveInt = Field(1, description="processes on each")
    mbit_per_s: NonNegativeFloat = Field(1000, description="rate of each host, in both directions; 0: no limit")
    delay_ms: NonNegativeFloat = Field(0, description="one-way delay of every packet")
    slow: Text | None = Field(
        None, pattern=r"^\d{1,9}@\d+(\.\d+)?(,\d{1,9}@\d+(\.\d+)?)*$", description="HOST@MBIT_PER_S,... of single hosts"
    )
    compute_ms: NonNegativeFloat = Field(0, description="waits in each training step of a task, besides its computing")
    condition: Literal[tuple(CONDITIONS)] = Field("even", description="how uneven these waits are")
    engine: Literal["decent_dp"] | None = Field(None, description="what trains a task in place of our gossip")
    limit_s: PositiveFloat = Field(600, description="seconds after which the program is ended")
    run: Text | None = Field(None, description="what torchrun gets: -m MODULE ... or FILE ...")
    down: bool = Field(False, description="remove what killed commands left behind, run nothing")


@main_function
def main(argv: Sequence[str]) -> int:
    """Bring the hosts up, run the program, remove the hosts; return the program's worst exit code."""
    arguments = parse(EmulateArguments, argv, MODULE, "Run a program on emulated hosts.")
    check_machine(arguments)
    if arguments.down:
        gone = leftovers()
        remove(gone)
        print(f"removed {len(gone)} namespaces")
        for name in existing():
            if name.startswith(PREFIX):
                match = NAME.fullmatch(name)
                reason = f"process {match['maker']} runs" if match else "not made by this script"
                print(f"left alone {name}: {reason}")
        return 0
    if arguments.run is None:
        raise UsageError('run=...: missing; expected what torchrun gets, such as run="-m cnn.train seed=1"')
    program = slowed(arguments)
    end_like_an_interruption()
    with emulated_hosts(arguments) as hosts:
        before = [host.statistics() for host in hosts]
        code = run_on(hosts, arguments.ranks_per_host, program, arguments.limit_s, described(arguments))
        for host, at_start in zip(hosts, before, strict=True):
            sent, received = (now - then for now, then in zip(host.statistics(), at_start, strict=True))
            print(f"host {host.number}: sent {sent / 1e6:.3f} MB, received {received / 1e6:.3f} MB", file=sys.stderr)
    return code


def slowed(arguments: EmulateArguments) -> list[str]:
    """Return what torchrun gets; UsageError if waits or an engine are asked for in what is no task's training."""
    program = words_of("run", arguments.run)
    asked = [key for key in ("compute_ms", "engine") if getattr(arguments, key)]
    if not asked:
        return program
    if not re.match(r"-m \w+\.train( |$)", " ".join(program)):
        raise UsageError(f'run="{arguments.run}" with {asked[0]}: expected a task\'s training, as "-m cnn.train ..."')
    if arguments.engine == "decent_dp" and importlib.util.find_spec("decent_dp") is None:
        raise UsageError("engine=decent_dp: decent-dp is not installed: make env")
    return ["-m", "scripts.emulate.slowed", *program[1:]]


def described(arguments: EmulateArguments) -> dict[str, str]:
    """Return the variables of the environment that tell programs where they run."""
    known = {"hosts", "ranks_per_host", "mbit_per_s", "delay_ms", "slow", "compute_ms", "condition", "engine"}
    return {"EMULATED_HOSTS": json.dumps(arguments.model_dump(include=known))}


def end_like_an_interruption() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that hosts are removed after them too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def check_machine(arguments: EmulateArguments) -> None:
    """Raise UsageError if this machine cannot emulate hosts."""
    if os.geteuid() != 0:
        raise UsageError("emulated hosts are network namespaces: run it as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed (Debian: iproute2)")
    slowed = [number for number, _ in slow_hosts(arguments) if not 1 <= number <= arguments.hosts]
    if slowed:
        raise UsageError(f"slow={arguments.slow}: there is no host {slowed[0]}, expected 1 to {arguments.hosts}")


def slow_hosts(arguments: EmulateArguments) -> list[tuple[int, float]]:
    """Return (host, Mbit/s) of the hosts with a different rate."""
    pairs = [pair.split("@") for pair in (arguments.slow or "").split(",") if pair]
    return [(int(number), float(rate)) for number, rate in pairs]


@contextlib.contextmanager
def emulated_hosts(arguments: EmulateArguments) -> Iterator[list[Host]]:
    """Bring up hosts on one bridge; afterwards remove them and end all processes in them."""
    stem = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}-"
    rates = dict.fromkeys(range(1, arguments.hosts + 1), arguments.mbit_per_s) | dict(slow_hosts(arguments))
    switch = f"{stem}switch"
    hosts = [Host(number, f"{stem}{number}") for number in rates]
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
            limit(switch, f"port{host.number}", rates[host.number])  # what it receives
            limit(host.namespace, "eth0", rates[host.number])  # what it sends
        if arguments.delay_ms:
            stack.enter_context(delayed(hosts, arguments.delay_ms, rates))
        yield hosts


def run_on(
    hosts: Sequence[Host],
    ranks_per_host: int,
    program: Sequence[str],
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run one torchrun on each host; return the worst exit code, 124 after limit_s. If one fails, all are ended.

    variables: further ones of the environment
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    launcher += [f"--nproc-per-node={ranks_per_host}", f"--master-addr={hosts[0].address}", "--master-port=29500"]
    environment = os.environ | dict(variables or {}) | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Addresses have no names here, and the last launcher finds the first one gone: nothing to complain about.
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
                print(f"error: not finished after limit_s={limit_s:g} s", file=sys.stderr)
                return 124
            time.sleep(0.1)
        deadline = time.monotonic() + 30  # the others find out by themselves, mostly
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
