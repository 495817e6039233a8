"""Measure what many ranks cost before they train: groups, connections, memory, time to the first step.

python -m scripts.benchmarks.startup layouts=4x2,8x4,16x4    emulated hosts, as root
torchrun ... -m scripts.benchmarks.startup                   on real ones

The model is tiny and really computed, so that a step is what the engine costs. On emulated hosts all ranks share the
cores of one machine: times grow with their number as they would not on a cluster; counts, memory and the CPU time of a
rank do not.
"""

# ruff: noqa: E402
import time

BEGAN = time.time()  # before the other imports: they are nearly all of a start

import os
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt
from torch import nn
from torch.distributed.distributed_c10d import _world  # there is no public list of groups

from common.cli import Text, main_function, parse
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel
from common.parallel.collectives import gather_objects
from common.report.benchmark import Benchmark
from common.topology import build
from scripts.benchmarks.several_hosts import LayoutArguments, Row, finish, names_in, run, say

MODULE = "scripts.benchmarks.startup"
GOSSIP = ("complete", "one_peer_exponential", "aer", "one_peer_ring", "ring")
KNOWN = ("allreduce", *GOSSIP)
WIDTH = 64  # of the model's two layers
TIMEOUT_S = 300.0
PAGE_MB = resource.getpagesize() / 1e6
COLUMNS = {
    "topology": "allreduce: this project's wrapper around DDP; others: gossip",
    "workers": "processes",
    "hosts": "machines, or emulated ones",
    "ranks_per_host": "processes of each",
    "mbit_per_s": "of a host's link in both directions, as set (emulated) or as given",
    "open_s": "from the start of the slowest process until the default process group is open; once for each layout",
    "wrap_s": "of making the wrapper, with its process groups, on the slowest rank",
    "first_step_s": "of the first step, on the slowest rank",
    "step_ms": "of later steps: median over steps, mean over ranks",
    "step_cpu_ms": "CPU time of a later step, all threads of a rank: mean over steps and ranks",
    "groups": "process groups that the wrapper made and that the rank with most of them belongs to",
    "connections": "sockets that were opened with them until the end of the last step, on the rank with most of them",
    "wrapper_mb": "by how much resident memory grew meanwhile, median over ranks",
    "resident_mb": "resident memory afterwards, median over ranks",
}
FORMATS = {"mbit_per_s": ",.0f", "groups": ".0f", "connections": ".0f", "wrapper_mb": ".1f", "resident_mb": ".0f"}


class BenchArguments(LayoutArguments):
    """Command line of scripts.benchmarks.startup."""

    topologies: Text = Field(",".join(KNOWN), description=f"names among {', '.join(KNOWN)}")
    steps: PositiveInt = Field(20, description="timed ones, after the first")


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure every topology, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Measure what many ranks cost before they train.")
    names = names_in(arguments.topologies, KNOWN, "topologies")
    benchmark = Benchmark("startup", "Start of many ranks", COLUMNS, FORMATS)

    def measure(device: torch.device, ranks_per_host: int) -> list[Row]:
        opened = max(gather_objects(time.time() - BEGAN))
        rows = [row for name in names for row in of_topology(name, device, ranks_per_host, arguments.steps)]
        return [row | {"open_s": opened} for row in rows]

    return run(MODULE, arguments, benchmark, measure, conclude)


def of_topology(name: str, device: torch.device, ranks_per_host: int, steps: int) -> list[Row]:
    """Return one row; print why and return none where the topology does not exist for these workers."""
    try:
        wrap = wrapper(name, ranks_per_host)
    except ValueError as error:
        say(f"{name}: skipped: {error}")
        return []
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    inputs = torch.ones(1, WIDTH, device=device)
    torch.optim.SGD(module.parameters())  # the first optimizer of a process imports the compiler
    dist.barrier()
    before, begin = (len(_world.pg_map), sockets(), resident_mb()), time.perf_counter()
    model = wrap(module)
    optimizer = model.attach(torch.optim.SGD(module.parameters(), lr=0.01))
    seconds, cpu_s = [time.perf_counter() - begin], []
    for _ in range(1 + steps):
        begin = time.perf_counter()
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(device)
        seconds.append(time.perf_counter() - begin)
        cpu_s.append(time.process_time())
    memory = resident_mb()
    found = [
        *(len(_world.pg_map) - before[0], sockets() - before[1], memory - before[2], memory),
        *(seconds[0], seconds[1], statistics.median(seconds[2:]), (cpu_s[-1] - cpu_s[0]) / steps),
    ]
    model.close()
    groups, connections, grown, memory, wrapped, first, step, cpu = zip(*gather_objects(found), strict=True)
    return [
        {
            "topology": name,
            "wrap_s": max(wrapped),
            "first_step_s": max(first),
            "step_ms": 1000 * statistics.mean(step),
            "step_cpu_ms": 1000 * statistics.mean(cpu),
            "groups": max(groups),
            "connections": max(connections),
            "wrapper_mb": statistics.median(grown),
            "resident_mb": statistics.median(memory),
        }
    ]


def wrapper(name: str, ranks_per_host: int) -> Callable[[nn.Module], DataParallel]:
    """Return what wraps a model. Raises ValueError where the topology does not exist for these workers."""
    if name == "allreduce":
        return lambda module: AllReduceDataParallel(module, timeout_s=TIMEOUT_S)
    topology = build(name, dist.get_world_size(), ranks_per_host)
    return lambda module: DecentralizedDataParallel(module, topology, timeout_s=TIMEOUT_S)


def sockets() -> int:
    """Return the number of this process's open sockets."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link).startswith("socket:") for link in links)


def resident_mb() -> float:
    """Return this process's resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB


def conclude(rows: Sequence[Row]) -> list[str]:
    """Say what was measured."""
    return [
        "Wrapper after wrapper in the same processes, closed in between, with torch's SGD and a model of "
        f"{2 * WIDTH * (WIDTH + 1):,} parameters. Computing is real: ranks that share cores take turns.",
    ]


if __name__ == "__main__":
    sys.exit(main())
