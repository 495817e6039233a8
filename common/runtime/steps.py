"""Simulates the steps of a run: who waits for whom, and for how long.

Time advances by the recurrences below, exactly (max-plus algebra), for all workers at once; what is random are the
compute times. Thousands of workers take seconds.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.runtime.cluster import Cluster
from common.runtime.network import allreduce_ms, round_ms
from common.topology import Topology

STEPS, DISCARDED = 200, 20  # the first steps, when all workers begin at once, do not count


@dataclass(frozen=True)
class Times:
    """What a simulation measured, in ms.

    step:     mean duration of a step over steps and workers
    compute:  mean of forward, backward and update; what a worker alone would take
    """

    step: float
    compute: float

    @property
    def exposed(self) -> float:
        """Time of a step in which a worker waits for others or for the network."""
        return self.step - self.compute


def simulate_gossip(
    cluster: Cluster,
    topology: Topology,
    order: Literal["awc", "atc"] = "awc",
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Times:
    """Gossip: worker i's update ends at

        awc:  T_i(t) = max(T_i(t-1) + c_i(t),  max_j T_j(t-1) + e_i(t)) + u        j: i and those it takes from
        atc:  T_i(t) = max_j (T_j(t-1) + c_j(t) + u) + e_i(t)

    with compute time c, exchange time e (network.round_ms) and update time u. Raises ValueError if topology and cluster
    have different numbers of workers.
    """
    if topology.world_size != cluster.ranks:
        raise ValueError(f"topology of {topology.world_size} workers on a cluster of {cluster.ranks}")
    compute = cluster.draw_compute_ms(steps, seed)
    ended = np.zeros(cluster.ranks)
    for t in range(steps):
        if t == DISCARDED:
            begin = ended.mean()
        round_ = topology.round(t)
        exchange = round_ms(cluster, round_)
        ready = ended if order == "awc" else ended + compute[t] + cluster.update_ms
        starts = np.array([max(ready[j] for j in row) for row in round_.weights])
        if order == "awc":
            ended = np.maximum(ended + compute[t], starts + exchange) + cluster.update_ms
        else:
            ended = starts + exchange
    return _times(ended.mean() - begin, compute, cluster)


def simulate_allreduce(cluster: Cluster, *, steps: int = STEPS, seed: int = 0) -> Times:
    """All-reduce of gradients in buckets, as DistributedDataParallel does it.

    Bucket b of B is ready on a worker when (b + 1) / B of its backward pass is over, travels when it is ready on all
    workers and the one before has arrived, and the update follows the last one.
    """
    compute = cluster.draw_compute_ms(steps, seed)
    share = (1 - cluster.backward_share) + cluster.backward_share * np.arange(1, cluster.buckets + 1) / cluster.buckets
    duration = allreduce_ms(cluster, cluster.payload_mb / cluster.buckets)
    ended = 0.0
    for t in range(steps):
        if t == DISCARDED:
            begin = ended
        slowest = compute[t].max()
        arrived = ended
        for part in share:
            arrived = max(arrived, ended + part * slowest) + duration
        ended = arrived + cluster.update_ms
    return _times(ended - begin, compute, cluster)


def _times(total: float, compute: np.ndarray, cluster: Cluster) -> Times:
    counted = compute[DISCARDED:]
    return Times(total / len(counted), counted.mean() + cluster.update_ms)
