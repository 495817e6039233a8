"""Measure how a step's time falls with more workers at a fixed global batch: Figure 6 of arXiv 2410.11998.

python -m scripts.benchmarks.scaling layouts=2x2,4x2,8x2 mbit_per_s=200            emulated hosts, as root
torchrun --nnodes 4 --nproc-per-node 4 ... -m scripts.benchmarks.scaling           a cluster, one size after another

Computing is emulated: forward and backward are waits of compute_ms / workers, with gradients of the right shapes, as an
accelerator leaves the CPU free; the optimizer's step and the messages are real. With compute_ms=0 a stack of linear
layers really computes.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from common.cli import Text, UsageError, main_function, parse
from common.optim import AccumAdamW
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel
from common.parallel.collectives import gather_objects
from common.report.benchmark import Benchmark
from common.runtime.conditions import Condition
from common.topology import build
from scripts.benchmarks.host_interface import bytes_sent_by_host
from scripts.benchmarks.rounds import median_and_spread
from scripts.benchmarks.several_hosts import LayoutArguments, Row, finish, mean_over_hosts, names_in, run, say
from scripts.emulate.compute import EmulatedCompute

MODULE = "scripts.benchmarks.scaling"
LAYERS = 8  # of the model; their gradients come one after another


@dataclass(frozen=True)
class Method:
    """A curve of the figure. options: of DecentralizedDataParallel."""

    label: str
    topology: str
    between: bool = False
    options: dict[str, object] = field(default_factory=dict)
    accumulation_steps: int = 1

    @property
    def all_reduces(self) -> bool:
        """Whether gradients are averaged over all, by DDP."""
        return self.label.startswith("AllReduce")

    def accumulated(self) -> "Method":
        """Return the same with windows of 8 steps."""
        return replace(self, label=f"{self.label}, accumulated", accumulation_steps=8)


METHODS = {
    "allreduce": Method("AllReduce", "complete"),
    "sgp_exp": Method("SGP (Exp)", "one_peer_exponential", options={"push_sum": True}),
    "decent_exp": Method("Decent (Exp)", "one_peer_exponential"),
    "decent_exp_hypercube": Method("Decent (Exp, hypercube)", "hypercube"),  # the authors' library's "one-peer-exp"
    "decent_aer": Method("Decent (AER)", "aer"),
    "decent_exp_between_hosts": Method("Decent (Exp between hosts)", "one_peer_exponential", between=True),
    "decent_aer_staggered": Method("Decent (AER, staggered)", "aer", options={"phases": "staggered"}),
    # The ablation's: without overlap, gradients leave in one bucket, and gossip adapts then combines.
    "allreduce_no_overlap": Method("AllReduce, no overlap", "complete", options={"bucket_mb": 1000.0}),
    "decent_aer_no_overlap": Method("Decent (AER), no overlap", "aer", options={"order": "atc"}),
}
METHODS |= {
    f"{name}_accumulated": METHODS[name].accumulated()
    for name in ("allreduce", "allreduce_no_overlap", "decent_aer", "decent_aer_no_overlap")
}
SGP = (
    "SGP (Exp) does not measure SGP's overhead: the rounds of the exponential graph are doubly stochastic, push-sum's "
    "weights stay 1, and this engine then runs the code of Decent (Exp). The published SGP takes up to 91 % "
    "longer than Decent (Exp): on T4 and A100 by a fixed cost per step, cause unknown."
)
COLUMNS = {
    "method": "as the figure names it, if it does; SGP (Exp) runs what Decent (Exp) "
    "runs, as push-sum's weights stay 1 on this graph",
    "engine": "ddp: torch's DistributedDataParallel; ours: this engine",
    "topology": "of the messages; between hosts: that topology over hosts, complete inside",
    "workers": "processes",
    "hosts": "machines, or emulated ones",
    "ranks_per_host": "processes of each",
    "mbit_per_s": "of a host's link in both directions, as set (emulated) or as given",
    "payload_mb": "parameters of a worker, fp32",
    "compute": "forward and backward: a wait, or real layers",
    "step_ms": "a step: mean over the steps of a block and over ranks, median over blocks",
    "step_ms_spread": "interquartile range over blocks",
    "bytes_per_host": "that a host's interface sent in a step, headers included: mean over hosts; empty where no "
    "interface is named (GLOO_SOCKET_IFNAME)",
}
FORMATS = {"bytes_per_host": ",.0f", "mbit_per_s": ",.0f"}


class BenchArguments(LayoutArguments):
    """Command line of scripts.benchmarks.scaling."""

    layouts: Text = Field("2x2,4x2,8x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS_PER_HOST,...")
    methods: Text = Field(
        "allreduce,sgp_exp,decent_exp,decent_exp_hypercube,decent_aer", description=f"names among {', '.join(METHODS)}"
    )
    compute_ms: NonNegativeFloat = Field(
        2400, description="forward and backward of the whole global batch on one worker; 0: real ones"
    )
    jitter: NonNegativeFloat = Field(
        0, le=1, description="coefficient of variation of a step's compute time (lognormal): 0.05 is 5 %"
    )
    slow_host: Text | None = Field(
        None, pattern=r"^\d+@[\d.]+$", description="HOST@FACTOR: this host, from 1, computes FACTOR times slower"
    )
    samples: PositiveInt = Field(1024, description="the global batch of compute_ms=0")
    payload_mb: PositiveFloat = Field(5, description="MB (1e6 bytes) of parameters, up to rounding")
    bucket_mb: PositiveFloat = Field(1, description="MiB per message, of all methods")
    name: Text = Field("scaling", pattern=r"^[a-z0-9_]+$", description="of the table's files")
    steps: PositiveInt = Field(12, description="of a block; a multiple of the topologies' periods")
    blocks: PositiveInt = Field(5, ge=2, description="that are timed, after one that is not")


@main_function
def main(argv: Sequence[str]) -> int:
    """Time the methods on every layout, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time steps with more and more workers.")
    names = names_in(arguments.methods, tuple(METHODS), "methods")
    if not arguments.compute_ms and (arguments.jitter or arguments.slow_host):
        raise UsageError("compute_ms=0: jitter and slow_host are of emulated computing")
    benchmark = Benchmark(arguments.name, "Strong scaling at a fixed global batch", COLUMNS, FORMATS)

    def measure(device: torch.device, ranks_per_host: int) -> list[Row]:
        return [row for n in names for row in time_method(METHODS[n], device, ranks_per_host, arguments)]

    return run(MODULE, arguments, benchmark, measure, lambda rows: conclude(rows, arguments))


def time_method(method: Method, device: torch.device, ranks_per_host: int, arguments: BenchArguments) -> list[Row]:
    """Return one row; print why and return none where the method does not exist for these workers."""
    module, compute = workload(arguments, device, ranks_per_host)
    payload_mb = sum(p.nbytes for p in module.parameters()) / 1e6
    try:
        model = wrap(module, method, ranks_per_host, arguments)
    except ValueError as error:
        say(f"{method.label}: skipped: {error}")
        return []
    optimizer = model.attach(AccumAdamW(model.parameters(), accumulation_steps=method.accumulation_steps, fused=True))
    time_block(model, optimizer, arguments.steps, device)
    sent = bytes_sent_by_host()
    blocks = [time_block(model, optimizer, arguments.steps, device) for _ in range(arguments.blocks)]
    used = None if sent is None else (bytes_sent_by_host() - sent) / arguments.blocks / arguments.steps
    model.close()
    step_s, spread_s = median_and_spread(blocks)
    return [
        {
            "method": method.label,
            "engine": "ddp" if method.all_reduces else "ours",
            "topology": method.topology + " between hosts" * method.between,
            "payload_mb": payload_mb,
            "compute": compute,
            "step_ms": 1000 * step_s,
            "step_ms_spread": 1000 * spread_s,
            "bytes_per_host": mean_over_hosts(used, ranks_per_host),
        }
    ]


def workload(arguments: BenchArguments, device: torch.device, ranks_per_host: int) -> tuple[nn.Module, str]:
    """Return a worker's share of the global batch: a module whose forward() gives the loss, and its description."""
    n, rank = dist.get_world_size(), dist.get_rank()
    module = Layers(arguments.payload_mb, math.ceil(arguments.samples / n), device)
    if not arguments.compute_ms:
        return module, f"{LAYERS} linear layers, {len(module.inputs)} samples"
    compute_ms, factor = arguments.compute_ms / n, 1.0
    said = [f"wait of {compute_ms:g} ms"]
    if arguments.jitter:
        said.append(f"jitter {arguments.jitter:g}")
    if arguments.slow_host:
        host, times = arguments.slow_host.split("@")
        if not 1 <= int(host) <= n // ranks_per_host:
            raise UsageError(f"slow_host={arguments.slow_host}: expected a host from 1 to {n // ranks_per_host}")
        said.append(f"host {host} {times} times slower")
        if rank // ranks_per_host + 1 == int(host):
            factor = float(times)
    varying = Condition("jitter", variation=arguments.jitter)
    module = EmulatedCompute(module, compute_ms, condition=varying, factor=factor, seed=(0, rank))
    return module, ", ".join(said)


class Layers(nn.Module):
    """LAYERS equal square linear layers of about payload_mb MB (1e6 bytes, fp32) in all, and their random inputs."""

    def __init__(self, payload_mb: float, samples: int, device: torch.device) -> None:
        super().__init__()
        width = round(math.sqrt(payload_mb * 1e6 / 4 / LAYERS))
        self.stack = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)))
        self.inputs = torch.randn(samples, width, device=device)

    def forward(self) -> Tensor:
        """Return the mean square of the output."""
        return self.stack(self.inputs).square().mean()


def wrap(module: nn.Module, method: Method, ranks_per_host: int, arguments: BenchArguments) -> DataParallel:
    """Wrap the model for its method. Raises ValueError where it does not exist for these workers. Collective."""
    options = {"bucket_mb": arguments.bucket_mb} | method.options
    if method.all_reduces:
        return AllReduceDataParallel(module, **options)
    n = dist.get_world_size()
    topology = build(method.topology, n, ranks_per_host, between_hosts=method.between)
    return DecentralizedDataParallel(module, topology, **options)


def time_block(model: DataParallel, optimizer: torch.optim.Optimizer, steps: int, device: torch.device) -> float:
    """Return the seconds of a step: mean over this block and all ranks. Collective."""
    finish(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    finish(device)
    return statistics.mean(gather_objects((time.perf_counter() - begin) / steps))


def conclude(rows: Sequence[Row], arguments: BenchArguments) -> list[str]:
    """Return what was measured, the speed-ups over all-reduce, and what is missing."""
    if not rows:
        raise UsageError(f"methods={arguments.methods}: none exists for these workers")
    speed_ups = []
    for layout in dict.fromkeys((row["workers"], row["hosts"], row["mbit_per_s"]) for row in rows):
        here = {row["method"]: row for row in rows if (row["workers"], row["hosts"], row["mbit_per_s"]) == layout}
        if "AllReduce" in here and len(here) > 1:
            baseline = here.pop("AllReduce")["step_ms"]
            faster = ", ".join(f"{name} {baseline / row['step_ms']:.2f}" for name, row in here.items())
            speed_ups.append(f"{layout[0]} workers: {faster}.")
    present = {row["method"] for row in rows}
    missing = [METHODS[name].label for name in arguments.methods.split(",") if METHODS[name].label not in present]
    computing = (
        f"Computing was emulated: forward and backward are waits of {arguments.compute_ms:g} ms / workers."
        if arguments.compute_ms
        else f"Computing was real: {LAYERS} linear layers, {arguments.samples} samples / workers."
    )
    return [
        f"{computing} The optimizer's step (AccumAdamW, fused; s = 1, or 8 where accumulated) and messages are real. "
        "The published milliseconds, of other machines and another model, are in results/paper/figure6.yaml.",
        *([f"Times as fast as all-reduce: {' '.join(speed_ups)}"] if speed_ups else []),
        *([SGP] if METHODS["sgp_exp"].label in present else []),
        *([f"Skipped, as these workers have no such topology: {', '.join(missing)}."] if missing else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
