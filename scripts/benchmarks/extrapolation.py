"""Predict steps and mixing up to more workers than can be measured here: the runtime model, nothing is run.

python -m scripts.benchmarks.extrapolation      results/benchmarks/extrapolation.{csv,md}
python -m scripts.figures figure=extrapolation  its picture
"""

import math
import sys
from collections.abc import Iterator, Sequence

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from tqdm import tqdm

from common.cli import Arguments, Text, command_of, main_function, parse
from common.report.benchmark import Benchmark
from common.runtime.cluster import Cluster
from common.runtime.plan import plan
from common.topology import build

MODULE = "scripts.benchmarks.extrapolation"
TOPOLOGIES = ("complete", "one_peer_exponential", "aer", "ring")
LEFT = 0.01  # of the disagreement between workers, when they count as agreeing
COLUMNS = {
    "method": "all-reduce of gradients in a ring, or gossip of parameters",
    "topology": "of gossip; between hosts: every host averages inside first",
    "phases": "staggered: every second bucket runs the rounds in another order",
    "workers": "on all hosts",
    "hosts": "of equally many workers",
    "step_ms": "predicted time of a step",
    "exposed_ms": "of this, predicted waiting for others or for the network",
    "speedup": "predicted, over all-reduce on as many workers",
    "rounds": f"until at most {LEFT:.0%} of the disagreement between workers is left, from the spectral gap; where a "
    "period averages exactly, its rounds; 1 where everybody averages with everybody",
    "agreement_s": "rounds x step_ms in s",
    "contraction_per_s": f"-ln {LEFT:g} / agreement_s: e-folds of the disagreement in a second",
}
FORMATS = {"step_ms": ".1f", "exposed_ms": ".1f", "rounds": ",.0f", "agreement_s": ".3g", "contraction_per_s": ".3g"}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.extrapolation: fields of common.runtime's Cluster, and the sizes."""

    workers: Text = Field("8,16,32,64,128,256,512,1024", pattern=r"^\d+(,\d+)*$", description="on all hosts")
    workers_per_host: PositiveInt = Field(8, description="of each")
    payload_mb: PositiveFloat = Field(500, description="a worker's parameters: 125 M in fp32")
    compute_ms: PositiveFloat = Field(150, description="forward and backward of a step")
    update_ms: NonNegativeFloat = Field(5, description="the optimizer's step")
    jitter: NonNegativeFloat = Field(0.05, le=1, description="standard deviation of the logarithm of a compute time")
    inter_gbps: PositiveFloat = Field(100, description="link of a host to the others")
    intra_gbps: PositiveFloat = Field(1000, description="between two workers of a host")
    latency_us: NonNegativeFloat = Field(20, description="of a message between hosts")
    steps: PositiveInt = Field(60, ge=50, description="to simulate")
    output: Text = Field("results/benchmarks", description="where the table goes")


@main_function
def main(argv: Sequence[str]) -> int:
    """Predict, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Predict steps and mixing of many workers.")
    benchmark = Benchmark("extrapolation", "Predicted, not measured: many workers", COLUMNS, FORMATS)
    counts = [int(count) for count in arguments.workers.split(",")]
    rows = [row for count in tqdm(counts, desc="workers", disable=None) for row in predict(count, arguments)]
    settings = ", ".join(f"{name} {value:g}" for name, value in of_cluster(arguments).items())
    conclusion = [
        f"Everything here is predicted by the runtime model, for {settings}; nothing was run. How far such predictions "
        "are from measured steps of 8 processes is in parallel_prediction.md; with more workers they are unchecked.",
        "All-reduce is a ring, whose latency grows with the number of workers; trees, which NCCL takes for short "
        "messages, are not modelled.",
    ]
    benchmark.write(rows, conclusion, arguments.output, command_of(MODULE, arguments), "1 used")
    return 0


def of_cluster(arguments: BenchArguments) -> dict[str, float]:
    """Return the arguments that are numbers of the cluster."""
    return {name: value for name, value in arguments if name in Cluster.__dataclass_fields__}


def predict(workers: int, arguments: BenchArguments) -> Iterator[dict[str, object]]:
    """Yield a row for all-reduce and for each topology that exists with this number of workers."""
    per_host = min(workers, arguments.workers_per_host)
    cluster = Cluster(hosts=workers // per_host, **of_cluster(arguments) | {"workers_per_host": per_host})
    for row in plan(cluster, TOPOLOGIES, steps=arguments.steps).frame.to_dict("records"):
        rounds = 1 if row["topology"] == "complete" else rounds_to_agree(row["topology"], cluster)
        agreement_s = rounds * row["step_ms"] / 1000
        mixing = {"agreement_s": agreement_s, "contraction_per_s": -math.log(LEFT) / agreement_s}
        yield row | {"workers": workers, "hosts": cluster.hosts, "rounds": rounds} | mixing


def rounds_to_agree(label: str, cluster: Cluster) -> float:
    """Return the rounds after which `LEFT` of the disagreement is left, on a topology as `plan` names it."""
    name = label.removesuffix(" between hosts")
    size = (cluster.workers, cluster.workers_per_host) if name == label else (cluster.hosts, 1)
    topology = build(name, *size)
    gap = topology.spectral_gap()
    return topology.period if gap >= 1 else math.log(LEFT) / math.log1p(-gap)


if __name__ == "__main__":
    sys.exit(main())
