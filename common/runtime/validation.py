"""The runtime model against step times measured on emulated hosts, the rows of `results/benchmarks/parallel.csv`.

Nothing is fitted to the rows that are predicted. The update takes as long as in the rows of the engine "alone" with the
same optimizer (whose name, "torch" or "fused", stands in their column `topology`); links have the rate that was set;
workers compute in every step as long as was emulated, however unevenly.
"""

import re
from collections.abc import Sequence

import pandas as pd

from common.local_steps import LocalSteps
from common.runtime.cluster import Cluster
from common.runtime.conditions import CONDITIONS
from common.runtime.steps import simulate_allreduce, simulate_gossip
from common.topology import NAMES, Topology, build

FRAMING = 1448 / 1514  # payload of a full Ethernet frame; rate limits count whole frames
MB_OF_MIB = 2**20 / 1e6  # buckets are set in MiB, payloads counted in 1e6 bytes
# The names of decent-dp's topologies, and ours.
DECENT_DP_NAMES = {
    "ring": "one_peer_ring",
    "one_peer_exp": "hypercube",
    "one_peer_exponential": "hypercube",
    "alternating_exp_ring": "aer",
}
GROUP = ["model", "hosts", "ranks_per_host", "compute_ms"]
NEEDED = ["engine", *GROUP, "condition", "mbit_per_s", "topology", "step_ms", "payload_mb", "bucket_mb"]
NEEDED += ["steps", "rounds"]


def predict_measured(
    measured: pd.DataFrame, *, delay_ms: float, intra_gbps: float, warm_up: int, seed: int
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows whose computing was emulated, and a sentence for each row left out.

    To their columns come update_ms, measured_ms, predicted_ms and error_percent. Before the steps that were timed were
    `warm_up` others; compute times were drawn with `seed`.

    Raises ValueError for missing columns.
    """
    missing = [name for name in NEEDED if name not in measured]
    if missing:
        raise ValueError(f"columns {', '.join(missing)} are missing")
    alone = measured[(measured.engine == "alone") & (measured.condition == "even")]
    updates = (
        (alone.step_ms - alone.compute_ms).clip(lower=0).groupby([alone[n] for n in (*GROUP, "topology")]).median()
    )
    rows, left_out = [], []
    for row in measured[measured.engine != "alone"].itertuples():
        label = f"{row.engine}, {row.topology}, {row.hosts} x {row.ranks_per_host}, {row.mbit_per_s:g} Mbit/s"
        label += "" if row.condition == "even" else f", {row.condition}"
        if not row.compute_ms > 0:
            left_out.append(f"{label}: a real model's compute time is not known apart from the rest")
            continue
        optimizer = "fused" if row.engine in ("ours", "ours_local") else "torch"
        layout = (row.model, row.hosts, row.ranks_per_host, row.compute_ms, optimizer)
        if layout not in updates:
            left_out.append(f"{label}: computing alone was not measured there, so the update's time is not known")
            continue
        update_ms = float(updates[layout])
        cluster = Cluster(
            hosts=row.hosts,
            workers_per_host=row.ranks_per_host,
            payload_mb=row.payload_mb,
            compute_ms=row.compute_ms,
            update_ms=update_ms,
            inter_gbps=row.mbit_per_s / 1000 * FRAMING,
            intra_gbps=intra_gbps,
            latency_us=1000 * delay_ms,
            bucket_mb=row.bucket_mb * MB_OF_MIB,
            gossip_bucket_mb=row.bucket_mb * MB_OF_MIB,
        )
        counted = {"steps": warm_up + row.steps * row.rounds, "discarded": warm_up, "seed": seed}
        try:
            predicted = _predict(CONDITIONS[row.condition].on(cluster), row.engine, row.topology, **counted)
        except ValueError as error:
            left_out.append(f"{label}: {error}")
            continue
        rows.append(
            {name: getattr(row, name) for name in NEEDED}
            | {
                "update_ms": update_ms,
                "measured_ms": row.step_ms,
                "predicted_ms": predicted,
                "error_percent": 100 * (predicted / row.step_ms - 1),
            }
        )
    return pd.DataFrame(rows), left_out


def _predict(cluster: Cluster, engine: str, label: str, **counted: int) -> float:
    if engine == "ddp":
        return simulate_allreduce(cluster, **counted).step
    local = None
    if engine == "ours_local":
        label, H, tau = label.rsplit("/", 2)
        local = LocalSteps(int(H), int(tau))
    name, between, staggered = read_topology(label)
    if engine == "decent_dp":
        topology = _topology(DECENT_DP_NAMES.get(name, name), cluster, between)
        return simulate_gossip(cluster, topology, flat=True, **counted).step
    if engine in ("ours", "ours_local"):
        topology = _topology(name, cluster, between)
        phases = "staggered" if staggered else "aligned"
        return simulate_gossip(cluster, topology, phases=phases, local=local, **counted).step
    raise ValueError(f"engine {engine!r}: expected ddp, decent_dp, ours or ours_local")


def read_topology(label: str) -> tuple[str, bool, bool]:
    """Return (name, between hosts, staggered) of labels like "aer staggered" or "one-peer-exponential between hosts".

    Raises ValueError for a name that is neither ours nor decent-dp's.
    """
    words = re.sub(r"[\s_\-(),/]+", "_", label.lower()).strip("_")
    staggered, between = "staggered" in words, "between_hosts" in words
    name = re.sub(r"_?(staggered|aligned|between_hosts)", "", words).strip("_")
    known: Sequence[str] = (*NAMES, *DECENT_DP_NAMES)
    if name not in known:
        raise ValueError(f"topology {label!r}: expected one of {', '.join(known)}")
    return name, between, staggered


def _topology(name: str, cluster: Cluster, between: bool) -> Topology:
    if between and cluster.workers_per_host > 1:
        return build(name, cluster.workers, cluster.workers_per_host, between_hosts=True)
    return build(name, cluster.workers, cluster.workers_per_host)
