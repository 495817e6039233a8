"""Measure how long averaging takes, without any training: Table 1 of arXiv 2410.11998.

python -m scripts.benchmarks.communication layouts=4x2,8x1 mbit_per_s=200 iterations=20         emulated hosts, as root
torchrun --nnodes 4 --nproc-per-node 4 ... -m scripts.benchmarks.communication iterations=8196  as in the paper

Every iteration averages three fp32 tensors of 25 MB: by torch.distributed.all_reduce (allreduce), or by one gossip
round of a topology, launched and merged by the engine as a training step does it, with nothing to overlap.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from tqdm import tqdm

from common.cli import Text, UsageError, main_function, parse
from common.parallel import DecentralizedDataParallel
from common.parallel.collectives import gather_objects
from common.report.benchmark import Benchmark
from common.topology import Topology, build
from scripts.benchmarks.host_interface import bytes_sent_by_host
from scripts.benchmarks.several_hosts import LayoutArguments, Row, finish, mean_over_hosts, names_in, run, say

MODULE = "scripts.benchmarks.communication"
BETWEEN = "_between_hosts"  # that topology over hosts, complete inside each
STAGGERED = "aer_staggered"
GOSSIP = (
    "complete",
    "one_peer_exponential",
    "aer",
    "one_peer_ring",
    "ring",
    "static_exponential",
    "hypercube",
    "torus",
    "grid",
)
KNOWN = ("allreduce", *GOSSIP, STAGGERED, *(f"{name}{BETWEEN}" for name in ("one_peer_exponential", "one_peer_ring")))
WARM_UP = 2  # iterations that open connections
PUBLISHED = (
    "Beside it, published: Table 1 of arXiv 2410.11998 measures 8,196 iterations on 16 A100 of 4 nodes with 100 Gbit/s "
    "InfiniBand, and on 16 A40 of 4 nodes with 25 Gbit/s Ethernet. Its times are not among the published numbers that "
    "this project has: not published, as far as is known here."
)
COLUMNS = {
    "topology": f"allreduce: torch.distributed.all_reduce; others: rounds of gossip by this engine (*{BETWEEN}: that "
    "topology over hosts, complete inside)",
    "workers": "processes",
    "hosts": "machines, or emulated ones",
    "ranks_per_host": "processes of each",
    "mbit_per_s": "of a host's link in both directions, as set (emulated) or as given",
    "backend": "of torch.distributed",
    "iterations": "timed ones",
    "tensors": "what is averaged in each",
    "seconds": "of all iterations, on the slowest rank",
    "seconds_per_iteration": "seconds / iterations",
    "bytes_per_host": "that a host's interface sent in an iteration, headers included: mean over hosts; empty where no "
    "interface is named (GLOO_SOCKET_IFNAME)",
}
FORMATS = {"seconds_per_iteration": ".4f", "bytes_per_host": ",.0f", "mbit_per_s": ",.0f"}


class BenchArguments(LayoutArguments):
    """Command line of scripts.benchmarks.communication."""

    topologies: Text = Field(
        "allreduce,complete,one_peer_exponential,one_peer_exponential_between_hosts,aer,one_peer_ring,ring",
        description=f"names among {', '.join(KNOWN)}",
    )
    iterations: PositiveInt = Field(20, description="timed ones; the paper has 8196")
    tensors: PositiveInt = Field(3, description="averaged in an iteration")
    tensor_mb: PositiveFloat = Field(25.0, description="MB (1e6 bytes) of each")
    bucket_mb: PositiveFloat | None = Field(None, description="MiB per message of gossip; none: a tensor")


@main_function
def main(argv: Sequence[str]) -> int:
    """Time the averages, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time averaging over all workers and by gossip.")
    names = names_in(arguments.topologies, KNOWN, "topologies")
    benchmark = Benchmark("communication", "Averaging without training", COLUMNS, FORMATS)

    def measure(device: torch.device, ranks_per_host: int) -> list[Row]:
        return [row for n in names for row in time_topology(n, device, ranks_per_host, arguments)]

    return run(MODULE, arguments, benchmark, measure, lambda rows: conclude(rows, arguments))


def time_topology(name: str, device: torch.device, ranks_per_host: int, arguments: BenchArguments) -> list[Row]:
    """Return one row; print why and return none where the topology does not exist for these workers."""
    try:
        iterate, close = averager(name, device, ranks_per_host, arguments)
    except (ValueError, TypeError) as error:
        say(f"{name}: skipped: {error}")
        return []
    for _ in range(WARM_UP):
        iterate()
    finish(device)
    dist.barrier()
    sent, begin = bytes_sent_by_host(), time.perf_counter()
    for _ in tqdm(range(arguments.iterations), desc=name, disable=dist.get_rank() != 0, mininterval=5):
        iterate()
    finish(device)
    seconds = max(gather_objects(time.perf_counter() - begin))
    used = None if sent is None else (bytes_sent_by_host() - sent) / arguments.iterations
    close()
    return [
        {
            "topology": name,
            "backend": dist.get_backend(),
            "iterations": arguments.iterations,
            "tensors": f"{arguments.tensors} x {arguments.tensor_mb:g} MB fp32",
            "seconds": seconds,
            "seconds_per_iteration": seconds / arguments.iterations,
            "bytes_per_host": mean_over_hosts(used, ranks_per_host),
        }
    ]


def averager(
    name: str, device: torch.device, ranks_per_host: int, arguments: BenchArguments
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return (one iteration, close). Raises ValueError where the topology does not exist. Collective."""
    numel = round(arguments.tensor_mb * 1e6 / 4)
    tensors = [torch.zeros(numel, device=device) for _ in range(arguments.tensors)]
    n = dist.get_world_size()
    if name == "allreduce":

        def all_reduce() -> None:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for one, tensor in zip(works, tensors, strict=True):
                one.wait()
                tensor.div_(n)

        return all_reduce, lambda: None
    model = DecentralizedDataParallel(
        nn.ParameterList(nn.Parameter(tensor) for tensor in tensors),
        topology_of(name, n, ranks_per_host),
        bucket_mb=arguments.bucket_mb or arguments.tensor_mb * 1e6 / 2**20,
        **({"phases": "staggered"} if name == STAGGERED else {}),
    )

    def gossip() -> None:
        model.mixer.launch()
        model.mixer.merge()

    return gossip, model.close


def topology_of(name: str, workers: int, ranks_per_host: int) -> Topology:
    """Return the topology of a row. Raises ValueError where it does not exist for these workers."""
    if name.endswith(BETWEEN):
        if ranks_per_host == 1:
            raise ValueError("hosts have one rank each: it is the topology itself")
        return build(name.removesuffix(BETWEEN), workers, ranks_per_host, between_hosts=True)
    return build(name.removesuffix("_staggered"), workers, ranks_per_host)


def conclude(rows: Sequence[Row], arguments: BenchArguments) -> list[str]:
    """Return what was measured, how the fastest compares with all-reduce, and what is published."""
    if not rows:
        raise UsageError(f"topologies={arguments.topologies}: none exists for these workers")
    ratios = []
    for layout in dict.fromkeys((r["hosts"], r["ranks_per_host"], r["mbit_per_s"]) for r in rows):
        here = {r["topology"]: r for r in rows if (r["hosts"], r["ranks_per_host"], r["mbit_per_s"]) == layout}
        if "allreduce" in here and len(here) > 1:
            name, best = min(here.items(), key=lambda item: item[1]["seconds"])
            ratio = best["seconds"] / here["allreduce"]["seconds"]
            rate = "" if layout[2] is None else f" at {layout[2]:g} Mbit/s"
            ratios.append(f"{layout[0]} hosts x {layout[1]}{rate}: {name} takes {ratio:.2f} of all-reduce's time.")
    measured = (
        "Measured: whole iterations, nothing overlaps with them; averaging once by gossip is not averaging over all."
    )
    return [" ".join([measured, *ratios]), PUBLISHED]


if __name__ == "__main__":
    sys.exit(main())
