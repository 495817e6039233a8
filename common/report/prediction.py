"""Predicted step times of simulated runs: by the runtime model, on a cluster like the paper's."""

from functools import cache
from typing import Any

from common.local_steps import resolve_local_steps
from common.planner.cluster import Cluster
from common.planner.steps import simulate_allreduce, simulate_gossip
from common.report.runs import FinishedRun, RunError
from common.topology import build

# Like Table 2 and Figure 6 on A40s: 65 M fp32 parameters, 25 Gbit/s Ethernet. Compute and jitter are assumptions.
PAYLOAD_MB, COMPUTE_MS, JITTER, INTER_GBPS = 260.0, 60.0, 0.05, 25.0
ASSUMED_SHORT = f"{PAYLOAD_MB:g} MB, {INTER_GBPS:g} Gbit/s, {COMPUTE_MS:g} ms of compute"
ASSUMED = (
    f"{INTER_GBPS:g} Gbit/s between hosts, {PAYLOAD_MB:g} MB of parameters, {COMPUTE_MS:g} ms of compute "
    f"(log-deviation {JITTER:g})"
)


def predicted_step_ms(run: FinishedRun) -> float:
    """Return the mean ms of a step, with the run's buckets or order, and its momentum if workers mix that too.

    Raises RunError if the run's configuration lacks something.
    """
    try:
        workers, parallel, topology = (run.config[key] for key in ("workers", "parallel", "topology"))
        method = parallel["method"]
        return _predict(
            workers["count"],
            workers["per_host"],
            parallel["bucket_mb"] if method == "allreduce" else None,
            {"allreduce": None, "decentralized": parallel.get("order")}[method],  # KeyError: another method
            bool(run.config.get("optimizer", {}).get("momentum_mixing", False)),
            tuple(sorted(topology.items())),
            parallel.get("local_steps", 1),
            parallel.get("merge_after"),
            parallel.get("fragments", 1),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{run.folder}: config.yaml: no step time can be predicted ({error!r})") from None


@cache
def _predict(
    workers: int,
    per_host: int,
    bucket_mb: float | None,
    order: Any,
    momentum: bool,
    topology: tuple[tuple[str, Any], ...],
    local_steps: int,
    merge_after: int | None,
    fragments: int,
) -> float:
    cluster = Cluster(
        hosts=workers // per_host,
        workers_per_host=per_host,
        payload_mb=PAYLOAD_MB,
        compute_ms=COMPUTE_MS,
        jitter=JITTER,
        inter_gbps=INTER_GBPS,
        bucket_mb=bucket_mb or PAYLOAD_MB,
    )
    if order is None:
        return float(simulate_allreduce(cluster).step)
    options = dict(topology)
    graph = build(options.pop("name"), workers, per_host, **options)
    rounds = {"merge_after": merge_after, "fragments": fragments}
    local = resolve_local_steps(order, local_steps, **rounds) if local_steps > 1 else None
    return float(simulate_gossip(cluster, graph, order, momentum=momentum, local=local).step)
