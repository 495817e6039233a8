"""Predict how fast links must be for workers to compute rather than wait: all-reduce, local steps, gossip.

python -m scripts.benchmarks.utilisation [hosts=8] [payload_mb=20000] [compute_ms=800] [latency_us=1000]
                                         [local_steps=10,50,100,300] [output=results/benchmarks]

Utilisation is the share of a step in which a worker computes. The runtime model predicts it at link rates that are 6 %
apart; how far such predictions are from measured steps is in results/benchmarks/parallel_prediction.md. What others
report is in results/paper/utilisation.yaml.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.cli import ONE_OR_SEVERAL, Arguments, Text, command_of, main_function, parse
from common.options import LocalSteps
from common.planner import Cluster, simulate_allreduce, simulate_gossip
from common.planner.steps import staggering_pays
from common.report.published import load_published
from common.topology import build
from scripts.benchmarks.record import Benchmark

MODULE = "scripts.benchmarks.utilisation"
SHARES = (50, 75, 80, 90, 95, 99)
BUCKETS = (2, 4, 8, 16, 32)  # of the gradients; DDP's 25 MB would be hundreds of them, each with its latency
GBPS = np.geomspace(1e-3, 1e5, 321)  # Gbit/s
COLUMNS = {
    "method": f"H: steps in a round. All-reduce: of gradients in every step, as DDP, in the best of {BUCKETS} buckets. "
    "Local SGD, DiLoCo: all workers average every H steps and wait for it; the outer step takes no time. Gossip: with "
    "overlap, in staggered phases where that lowers the most that a host sends. Gossip DiLoCo: on the one-peer "
    "exponential graph, a round travels during a third of the next H steps",
    **{f"gbps_{share}": f"rate of a host's link for a utilisation of {share} %, Gbit/s" for share in SHARES},
}
FORMATS = {name: ".3g" for name in COLUMNS if name.startswith("gbps")}


class UtilisationArguments(Arguments):
    """Command line of scripts.benchmarks.utilisation."""

    hosts: PositiveInt = Field(8, description="machines or data centres, one worker each")
    payload_mb: PositiveFloat = Field(20000.0, description="parameters of a worker; 20,000 is 10 billion in 16 bits")
    compute_ms: PositiveFloat = Field(800.0, description="forward and backward pass of a step")
    latency_us: NonNegativeFloat = Field(1000.0, description="latency of a message")
    jitter: NonNegativeFloat = Field(0.0, description="spread of the compute time, as in common.planner")
    local_steps: Annotated[tuple[PositiveInt, ...], ONE_OR_SEVERAL] = Field((10, 50, 100, 300), description="H")
    output: Text = Field("results/benchmarks", description="folder for utilisation.csv and .md")


@main_function
def main(argv: Sequence[str]) -> int:
    """Predict all methods at all rates and write the record."""
    arguments = parse(UtilisationArguments, argv, MODULE, "Predict the link rates that keep workers computing.")
    benchmark = Benchmark("utilisation", "Predicted, not measured: link rates for a utilisation", COLUMNS, FORMATS)
    cluster = Cluster(**arguments.model_dump(exclude={"local_steps", "output"}))
    said = (
        f"Everything here is predicted by the runtime model, for {cluster.hosts} hosts of a worker, "
        f"{cluster.payload_mb:g} MB, {cluster.compute_ms:g} ms of computing; nothing was run. What others report, "
        f"simulated and measured (sources: results/paper/utilisation.yaml):"
    )
    reported = load_published("utilisation").frame()
    conclude = [said, reported.to_markdown(index=False, floatfmt=".3g", missingval=""), "Ours:"]
    rows = [
        {"method": method, **rates(cluster, topology, local)}
        for method, topology, local in methods(arguments.local_steps)
    ]
    benchmark.write(rows, conclude, arguments.output, command_of(MODULE, arguments), used="no more than one core")
    return 0


def methods(local_steps: Sequence[int]) -> Iterator[tuple[str, str, LocalSteps | None]]:
    """Yield (label, topology, local steps) of the rows."""
    yield "all-reduce", "complete", None
    yield "gossip, AER", "aer", None
    yield "gossip, one-peer exponential", "one_peer_exponential", None
    for steps in local_steps:
        yield f"local SGD, DiLoCo, H = {steps}", "complete", LocalSteps(steps, merge_after=0)
        yield f"gossip DiLoCo, H = {steps}", "one_peer_exponential", LocalSteps(steps, merge_after=-(-steps // 3))


def rates(cluster: Cluster, topology: str, local: LocalSteps | None) -> dict[str, float | None]:
    """Return the rate for each utilisation, Gbit/s."""
    used = [utilisation(replace(cluster, inter_gbps=rate), topology, local) for rate in GBPS]
    return {f"gbps_{share}": needed(used, share / 100) for share in SHARES}


def utilisation(cluster: Cluster, topology: str, local: LocalSteps | None) -> float:
    """Return the predicted share of a step in which a worker computes."""
    if local is None and topology == "complete":
        sizes = [cluster.payload_mb / buckets for buckets in BUCKETS]
        every = [simulate_allreduce(replace(cluster, bucket_mb=size)) for size in sizes]
        times = min(every, key=lambda one: one.step)
    else:
        graph = None if topology == "complete" else build(topology, cluster.workers, cluster.workers_per_host)
        staggers = graph is not None and staggering_pays(graph, cluster.workers_per_host)
        times = simulate_gossip(cluster, graph, phases="staggered" if staggers else "aligned", local=local)
    return times.compute / times.step


def needed(used: Sequence[float], share: float) -> float | None:
    """Return the rate from which utilisation stays at `share` or above, interpolated log-linearly; None without one."""
    below = np.flatnonzero(np.asarray(used) < share)
    if not len(below):
        return float(GBPS[0])
    if below[-1] == len(GBPS) - 1:
        return None
    ends = slice(below[-1], below[-1] + 2)
    return float(np.exp(np.interp(share, used[ends], np.log(GBPS[ends]))))


if __name__ == "__main__":
    sys.exit(main())
