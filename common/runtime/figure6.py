"""The runtime model against the published step times of arXiv 2410.11998, Figure 6.

The compute time of n workers is a/n + b (strong scaling: the work is divided, kernel launches and the optimizer's step
are not). These two numbers are fitted to the three published ones of each cluster's column Decent (AER). The column of
all-reduce would not do: where the network is the limit, its times do not depend on computing. Links have the rate given
in the paper. Nothing else is fitted: latencies are 0 and links inside a host have 200 Gbit/s or more; neither is
published, and neither limits anything here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from common.runtime.cluster import Cluster
from common.runtime.links import mb_ms
from common.runtime.steps import simulate_allreduce, simulate_gossip
from common.topology import build

CALIBRATION = "Decent (AER)"
PAYLOAD_MB = 260.0  # about 65 M parameters (the paper's base model) of 4 bytes; not given with the figure
STEPS = 140  # 120 that count: whole periods of every topology here


def predict_figure6(
    published: pd.DataFrame, payload_mb: float = PAYLOAD_MB
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """Return one row for each published number, and {cluster: (a, b)} in ms.

    published:  columns cluster (such as "A40, 4 per node, 25 Gbps Ethernet"), workers, method, step_ms
    payload_mb: size of a worker's parameters

    Of the columns returned, predicted_ms is for the fewest bytes that a host can send (hierarchical; Exp between hosts,
    complete inside), predicted_flat_ms for workers that each send their whole vector, as the graphs are defined.
    """
    rows, fitted = [], {}
    for name, of_cluster in published.groupby("cluster", sort=False):
        L, inter_gbps = map(int, re.search(r"(\d+) per node, (\d+) Gbps", name).groups())
        base = Cluster(
            hosts=1, workers_per_host=L, payload_mb=payload_mb, inter_gbps=inter_gbps,
            intra_gbps=max(200.0, inter_gbps), latency_us=0.0, intra_latency_us=0.0,
        )  # fmt: skip
        aer = of_cluster[of_cluster.method == CALIBRATION]
        a, b = fitted[name] = calibrate(base, dict(zip(aer.workers, aer.step_ms.astype(float), strict=True)))
        for workers, of_size in of_cluster.groupby("workers", sort=False):
            cluster = replace(base, hosts=workers // L, compute_ms=a / workers + b)
            predicted = predict(cluster)
            for row in of_size.itertuples():
                least, flat = predicted[row.method]
                rows.append(
                    {
                        "cluster": name,
                        "workers": workers,
                        "hosts": cluster.hosts,
                        "ranks_per_host": L,
                        "method": row.method,
                        "published_ms": row.step_ms,
                        "predicted_ms": least,
                        "error_percent": 100 * (least / row.step_ms - 1),
                        "predicted_flat_ms": flat,
                        "error_flat_percent": 100 * (flat / row.step_ms - 1),
                        "used_as": "calibration" if row.method == CALIBRATION else "prediction",
                    }
                )
    return pd.DataFrame(rows), fitted


def calibrate(base: Cluster, step_ms: Mapping[int, float]) -> tuple[float, float]:
    """Return the (a, b) for which a/n + b fits the AER step times {workers: ms} best, by relative least squares."""
    workers, published = np.array(list(step_ms)), np.array(list(step_ms.values()))
    L = base.workers_per_host
    across = mb_ms(base.payload_mb, base.inter_gbps)  # a pair of hosts averages by S in both directions
    inside = 2 * mb_ms((L - 1) / L * base.payload_mb, base.intra_gbps)

    def errors(parameters: np.ndarray) -> np.ndarray:
        a, b = parameters
        return np.array([_aer_step_ms(a / n + b, across, inside) for n in workers]) / published - 1

    start = (workers[0] * published[0], 0.1 * published[-1])
    return tuple(map(float, least_squares(errors, start, bounds=(0, np.inf), x_scale=start).x))


def _aer_step_ms(compute_ms: float, across_ms: float, inside_ms: float) -> float:
    """Return the mean of the two kinds of rounds: hosts exchange across in every second one, each hides computing."""
    return (max(compute_ms, across_ms) + max(compute_ms, inside_ms)) / 2


def predict(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return {method: (ms with the fewest bytes, ms with each worker sending its whole vector)} for the figure."""
    n, L = cluster.workers, cluster.workers_per_host

    def both(topology: str, least: str) -> tuple[float, float]:
        few = build("aer", n, L) if least == "aer" else build(least, n, L, between_hosts=True)
        flat = simulate_gossip(cluster, build(topology, n, L), flat=True, steps=STEPS)
        return simulate_gossip(cluster, few, steps=STEPS).step, flat.step

    allreduce = simulate_allreduce(cluster, steps=STEPS).step
    exponential = both("one_peer_exponential", "one_peer_exponential")
    # SGP sends what Exp sends: the model does not distinguish them.
    return {
        "AllReduce": (allreduce, allreduce),
        "SGP (Exp)": exponential,
        "Decent (Exp)": exponential,
        CALIBRATION: both("aer", "aer"),
    }
