"""Simulates the steps of a run: who waits for whom, and for how long.

Events come in the order of a step (compute, then bucket after bucket: arrive, merge, update, launch), so that time
advances by recurrences for all workers at once (max-plus algebra); what is random are the compute times. Thousands of
workers take seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from common.runtime.cluster import Cluster
from common.runtime.exchange import Busy, Exchange, Route, exchange_of
from common.runtime.network import allreduce_ms
from common.topology import Topology

STEPS, DISCARDED = 200, 20  # the first steps, when all workers begin at once, do not count
Order = Literal["awc", "atc"]
Update = Literal["bucketwise", "whole"]
Phases = Literal["aligned", "staggered"]


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
    order: Order = "awc",
    *,
    phases: Phases = "aligned",
    update: Update = "bucketwise",
    route: Route = "auto",
    steps: int = STEPS,
    seed: int = 0,
) -> Times:
    """Gossip on a topology, whose rounds travel hierarchically where they can (`route="flat"`: never).

    phases:  "staggered" (see `splits_traffic`): odd buckets run the rounds 2k and 2k+1 in the other order
    update:  see `simulate_exchanges`

    Raises ValueError if topology and cluster have different numbers of workers, or the phases do not exist.
    """
    if topology.world_size != cluster.ranks:
        raise ValueError(f"topology of {topology.world_size} workers on a cluster of {cluster.ranks}")
    if phases == "staggered" and not splits_traffic(topology, cluster.workers_per_host):
        raise ValueError(
            "phases='staggered': expected topology aer, or one_peer_ring on hosts of an even number of ranks, got "
            f"{topology.name} on hosts of {cluster.workers_per_host}"
        )
    known: dict[int, Exchange] = {}

    def of_round(t: int) -> Exchange:
        if topology.period is None:
            return exchange_of(cluster, topology.round(t), route)
        index = t % topology.period
        if index not in known:
            known[index] = exchange_of(cluster, topology.round(index), route)
        return known[index]

    swaps = phases == "staggered" and topology.period > 1
    return simulate_exchanges(
        cluster, of_round, (lambda t: of_round(t ^ 1)) if swaps else None, order, update=update, steps=steps, seed=seed
    )


def splits_traffic(topology: Topology, workers_per_host: int) -> bool:
    """Whether in each step one half of the buckets stays inside of every host, where phases are staggered."""
    return topology.name == "aer" or (topology.name == "one_peer_ring" and workers_per_host % 2 == 0)


def simulate_exchanges(
    cluster: Cluster,
    even: Callable[[int], Exchange],
    odd: Callable[[int], Exchange] | None = None,
    order: Order = "awc",
    *,
    update: Update = "bucketwise",
    steps: int = STEPS,
    seed: int = 0,
) -> Times:
    """Gossip whose buckets travel in step t by the exchange `even(t)`, those with an odd number by `odd(t)` if given.

    With compute time c, update time u and B buckets, worker i's bucket b is merged and updated at

        awc:  T_i(t, b) = max(T_i(t, b-1), D_i(t, b)) + u/B,   T_i(t, -1) = T_i(t-1, B-1) + c_i(t)
        atc:  T_i(t, b) = T_i(t-1) + c_i(t) + (b+1) u/B

    where D is when the bucket arrived, launched at T(t-1, b) (awc, "bucketwise": our own optimizers) or when all
    buckets were updated (awc, "whole": any optimizer; it also updates only after the last one arrived), or at T(t, b)
    (atc). The step ends with the last bucket's update (awc) or arrival (atc).
    """
    n, B = cluster.ranks, cluster.gossip_buckets
    compute = cluster.draw_compute_ms(steps, seed)
    # After b + 1 of the B updates; an ordinary optimizer updates all at once.
    updates = cluster.update_ms * (np.arange(1, B + 1) / B if update == "bucketwise" else np.ones(B))[:, None]
    ended, launched = np.zeros(n), np.zeros((B, n))
    busy = Busy.nothing(n)
    begin = 0.0
    for t in range(steps):
        if t == DISCARDED:
            begin = ended.mean()
        computed = ended + compute[t]
        if order == "atc":
            ended = _travel(computed + updates, busy, even(t), odd and odd(t)).max(axis=0)
            continue
        done = np.maximum(_travel(launched, busy, even(t), odd and odd(t)), computed)
        if update == "whole":
            done = np.broadcast_to(done.max(axis=0), (B, n))
        # T(b) = max over a <= b of D(a) + (b + 1 - a) u/B, as a running maximum
        launched = np.maximum.accumulate(done - updates + updates[0], axis=0) + updates
        ended = launched[-1]
    return _times(ended.mean() - begin, compute, cluster)


def _travel(launched: np.ndarray, busy: Busy, even: Exchange, odd: Exchange | None) -> np.ndarray:
    if odd is None or len(launched) == 1:
        return even(launched, busy)
    # Both kinds at once: what either occupies counts from the next step on.
    other = replace(busy)
    done = np.empty_like(launched)
    done[::2] = even(launched[::2], busy)
    done[1::2] = odd(launched[1::2], other)
    busy.across = np.maximum(busy.across, other.across)
    busy.inside = np.maximum(busy.inside, other.inside)
    return done


def simulate_allreduce(cluster: Cluster, *, steps: int = STEPS, seed: int = 0) -> Times:
    """All-reduce of gradients in equal buckets, as DistributedDataParallel does it.

    Bucket b of B is ready on a worker when (b + 1) / B of its backward pass is over, travels when it is ready on all
    workers and the one before has arrived, and the update follows the last one.
    """
    compute = cluster.draw_compute_ms(steps, seed)
    share = (1 - cluster.backward_share) + cluster.backward_share * np.arange(1, cluster.buckets + 1) / cluster.buckets
    duration = allreduce_ms(cluster, cluster.payload_mb / cluster.buckets)
    ended = begin = 0.0
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
