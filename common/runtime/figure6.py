"""The model against the published step times of arXiv 2410.11998, Figure 6.

Calibrated from one column of each cluster, Decent (AER): the compute time of n workers is a/n + b (strong scaling: the
work is divided, the launch of kernels and the optimizer's step are not), two numbers for three published ones. The
all-reduce column would not do: where the network is the limit it says nothing about computing. Links have the rate
that the paper names. Nothing else is fitted; latencies are taken as 0, and links inside a host as 200 Gbit/s or more:
neither is published, and neither limits anything here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from common.runtime.cluster import Cluster
from common.runtime.formulas import aer_step_ms
from common.runtime.network import mb_ms
from common.runtime.steps import simulate_allreduce, simulate_gossip
from common.topology import build

CALIBRATION = "Decent (AER)"
PAYLOAD_MB = 260.0  # about 65 M parameters (the paper's base model) of 4 bytes; the figure does not say it
STEPS = 140  # 120 that count: whole periods of every topology here


def predict_figure6(
    published: pd.DataFrame, payload_mb: float = PAYLOAD_MB
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """One row for each published number, and {cluster: (a, b)} in ms.

    published:  columns cluster (such as "A40, 4 per node, 25 Gbps Ethernet"), workers, method, step_ms
    payload_mb: of a worker's parameters

    predicted_ms: gossip by as few bytes as a host can send (hierarchical; Exp between hosts, complete inside);
    predicted_flat_ms: every rank sends for itself, as the names of the graphs say literally.
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
    """(a, b) for which a/n + b fits the AER step times {workers: ms} best, in relative squares."""
    workers, published = np.array(list(step_ms)), np.array(list(step_ms.values()))
    L = base.workers_per_host
    across = mb_ms(base.payload_mb, base.inter_gbps)  # a pair of hosts averages by S in both directions
    inside = 2 * mb_ms((L - 1) / L * base.payload_mb, base.intra_gbps)

    def errors(parameters: np.ndarray) -> np.ndarray:
        a, b = parameters
        return np.array([aer_step_ms(a / n + b, across, inside) for n in workers]) / published - 1

    start = (workers[0] * published[0], 0.1 * published[-1])
    return tuple(map(float, least_squares(errors, start, bounds=(0, np.inf), x_scale=start).x))


def predict(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """{method: (ms by as few bytes as can be, ms with every rank sending for itself)} of the methods of the figure."""
    n, L = cluster.ranks, cluster.workers_per_host

    def both(topology: str, least: str) -> tuple[float, float]:
        few = build("aer", n, L) if least == "aer" else build(least, n, L, between_hosts=True)
        flat = simulate_gossip(cluster, build(topology, n, L), route="flat", steps=STEPS)
        return simulate_gossip(cluster, few, steps=STEPS).step, flat.step

    allreduce = simulate_allreduce(cluster, steps=STEPS).step
    exponential = both("one_peer_exponential", "one_peer_exponential")
    # SGP sends what Exp sends: to the model both are one.
    return {
        "AllReduce": (allreduce, allreduce),
        "SGP (Exp)": exponential,
        "Decent (Exp)": exponential,
        CALIBRATION: both("aer", "aer"),
    }
