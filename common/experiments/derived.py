"""Numbers derived from runs: predicted step times, and steps until a target."""

import json
import math
from functools import cache

import numpy as np
import pandas as pd

from common.experiments.runs import FinishedRun, RunError
from common.options import GossipOptions
from common.planner.cluster import Cluster
from common.planner.steps import simulate_allreduce, simulate_gossip, staggering_pays
from common.topology import build

# Like Table 2 and Figure 6 on A40s: 65 M fp32 parameters, 25 Gbit/s Ethernet. Compute and jitter are assumptions.
PAYLOAD_MB, COMPUTE_MS, JITTER, INTER_GBPS = 260.0, 60.0, 0.05, 25.0
ASSUMED_SHORT = f"{PAYLOAD_MB:g} MB, {INTER_GBPS:g} Gbit/s, {COMPUTE_MS:g} ms of compute"
ASSUMED = (
    f"{INTER_GBPS:g} Gbit/s between hosts, {PAYLOAD_MB:g} MB of parameters, {COMPUTE_MS:g} ms of compute "
    f"(log-deviation {JITTER:g})"
)


def predicted_step_ms(run: FinishedRun) -> float:
    """Return the predicted mean ms of a step, with the run's buckets or order, phases, and momentum if it is mixed too.

    All steps are predicted alike (local_steps_from = 0), in fp32 and without hooks.

    Raises RunError if the run's configuration lacks something.
    """
    try:
        parts = {key: run.config[key] for key in ("workers", "parallel", "topology")}
        return _predict(json.dumps(parts | {"optimizer": run.config.get("optimizer", {})}, sort_keys=True))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{run.folder}: config.yaml: no step time can be predicted ({error!r})") from None


@cache  # the seeds of a row differ in nothing that matters here
def _predict(config: str) -> float:
    workers, parallel, topology, optimizer = map(
        json.loads(config).__getitem__, ("workers", "parallel", "topology", "optimizer")
    )
    count, per_host, allreduce = workers["count"], workers["per_host"], parallel["method"] == "allreduce"
    order = None if allreduce else {"decentralized": parallel.get("order")}[parallel["method"]]  # no other method
    cluster = Cluster(
        hosts=count // per_host,
        workers_per_host=per_host,
        payload_mb=PAYLOAD_MB,
        compute_ms=COMPUTE_MS,
        jitter=JITTER,
        inter_gbps=INTER_GBPS,
        bucket_mb=(allreduce and parallel["bucket_mb"]) or PAYLOAD_MB,
    )
    if order is None:
        return float(simulate_allreduce(cluster).step)
    graph, steps = build(topology.pop("name"), count, per_host, **topology), parallel.get("local_steps", 1)
    rounds = {"merge_after": parallel.get("merge_after"), "fragments": parallel.get("fragments", 1)}
    local = GossipOptions(order, steps, **rounds).plan if steps > 1 else None
    momentum = bool(optimizer.get("momentum_mixing", False))
    phases = parallel.get("phases", "aligned") if staggering_pays(graph, per_host) else "aligned"
    return float(simulate_gossip(cluster, graph, order, phases=phases, momentum=momentum, local=local).step)


def is_simulated(run: FinishedRun) -> bool:
    """Return whether one process trained all workers, in which case times are predicted."""
    return run.setting("workers.kind") == "simulated"


def seconds_until(run: FinishedRun, steps: pd.Series) -> np.ndarray:
    """Return the seconds until these steps, without evaluation; the runtime model predicts simulated workers'."""
    if is_simulated(run):
        return steps.to_numpy() * predicted_step_ms(run) / 1000
    taken = run.curve("train", "time_step_ms").dropna()
    ends = taken["step"].to_numpy()
    seconds = np.cumsum(taken["time_step_ms"] * np.diff(ends, prepend=0)) / 1000
    return np.interp(steps, [0, *ends], [0, *seconds])


def steps_to_target(run: FinishedRun) -> float:
    """Return the step of the first evaluation that reached the table's target, inf if none did."""
    if run.target is None:
        raise RunError(f"{run.folder}: its table has no target")
    rows = run.curve("validation", run.target.metric).dropna()
    reached = rows["step"][[run.target.reached_by(value) for value in rows[run.target.metric]]]
    return math.inf if reached.empty else float(reached.iloc[0])
