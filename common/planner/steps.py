"""Simulation of the steps of a run: which workers wait, and for how long.

Events come in the order of a step (compute; then bucket after bucket: arrive, merge, update, launch), so time advances
by recurrences for all workers at once (max-plus algebra). Only compute times are random. Thousands of workers take
seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from common.options import LocalSteps
from common.planner.cluster import Cluster
from common.planner.links import allreduce_ms
from common.planner.round_time import Busy, RoundTime, complete, round_time
from common.topology import Round, Topology, bytes_leaving_hosts, staggered

STEPS, DISCARDED = 200, 20  # all workers begin the first step at the same time, so the first steps do not count
FEWEST_ROUNDS = 8
Order = Literal["awc", "atc"]
Phases = Literal["aligned", "staggered"]


@dataclass(frozen=True)
class Times:
    """Mean times of a simulated step over steps and workers, in ms.

    step:     duration of a step
    compute:  forward, backward and update: the duration of a step of one worker alone
    """

    step: float
    compute: float

    @property
    def exposed(self) -> float:
        """Time of a step in which a worker waits for others or for the network."""
        return self.step - self.compute


def simulate_gossip(
    cluster: Cluster,
    topology: Topology | None,
    order: Order = "awc",
    *,
    phases: Phases = "aligned",
    momentum: bool = False,
    flat: bool = False,
    local: LocalSteps | None = None,
    steps: int = STEPS,
    discarded: int = DISCARDED,
    seed: int = 0,
) -> Times:
    """Simulate gossip on a topology; rounds are hierarchical where possible, unless `flat`.

    topology:  None: all workers average in every round, without the n^2 weights of the complete graph
    phases:    "staggered" (where `staggering_pays`): every second bucket runs the rounds 2k and 2k+1 in the other order
    momentum:  whether momentum is mixed too; see `_simulate_rounds`
    local:     local steps, in place of `order`; see `_simulate_local_steps`
    steps:     number of steps to simulate; the first `discarded` do not count

    Raises ValueError if topology and cluster have different numbers of workers, staggered phases would not pay, or
    momentum is mixed with an order other than "atc".
    """
    if topology is not None and topology.world_size != cluster.workers:
        raise ValueError(f"topology of {topology.world_size} workers on a cluster of {cluster.workers}")
    if phases == "staggered" and (topology is None or not staggering_pays(topology, cluster.workers_per_host)):
        raise ValueError(
            "phases='staggered': expected a topology whose hosts then send less in their busiest step, got "
            f"{'complete' if topology is None else topology.name} on hosts of {cluster.workers_per_host}"
        )
    even = _round_times(cluster, topology, flat)
    odd = _round_times(cluster, staggered(topology), flat) if phases == "staggered" else None
    if local is not None:
        return _simulate_local_steps(cluster, even, odd, local, steps, discarded, seed)
    return _simulate_rounds(cluster, even, odd, order, momentum, steps, discarded, seed)


def staggering_pays(topology: Topology, workers_per_host: int) -> bool:
    """Return whether staggered phases lower the largest amount that any host sends to others in a step."""
    try:
        other = staggered(topology)
    except ValueError:  # it is random, or the order of its rounds matters
        return False

    def most(first: Round, second: Round) -> float:
        # Each of the two schedules carries half of the payload.
        one, two = (bytes_leaving_hosts(round_, workers_per_host, 0.5) for round_ in (first, second))
        return max((one.get(host, 0.0) + two.get(host, 0.0) for host in one | two), default=0.0)

    return max(map(most, topology.schedule, other.schedule)) < max(map(most, topology.schedule, topology.schedule))


def _round_times(cluster: Cluster, topology: Topology | None, flat: bool) -> Callable[[int], RoundTime]:
    """Return the time of each step's round; each round of a period is computed once."""
    if topology is None:
        everybody = complete(cluster, flat=flat)
        return lambda t: everybody
    if topology.period is None:
        return lambda t: round_time(cluster, topology.round(t), flat=flat)
    of_period = cache(lambda index: round_time(cluster, topology.round(index), flat=flat))
    return lambda t: of_period(t % topology.period)


def _simulate_rounds(
    cluster: Cluster,
    even: Callable[[int], RoundTime],
    odd: Callable[[int], RoundTime] | None,
    order: Order,
    momentum: bool,
    steps: int,
    discarded: int,
    seed: int,
) -> Times:
    """Simulate gossip in which the round of step t takes `even(t)`, or for odd-numbered buckets `odd(t)` if given.

    With compute time c, update time u and B buckets, worker i's bucket b is merged and updated at

        awc:  T_i(t, b) = max(T_i(t, b-1), D_i(t, b)) + u/B,   T_i(t, -1) = T_i(t-1, B-1) + c_i(t)
        atc:  T_i(t, b) = T_i(t-1) + c_i(t) + (b+1) u/B

    where D is the time at which the bucket arrived. With atc it was launched at T(t, b), with awc at T(t-1, b), as in
    our own optimizers. The step ends with the last bucket's update (awc) or arrival (atc).

    With `momentum`, which needs atc, a worker first mixes its momentum, a message as large as the parameters (DmSGD):
    all its buckets are launched at T_i(t-1) + c_i(t), and the arrival of the last one replaces that time in atc's
    equation. Raises ValueError for momentum with another order.
    """
    if momentum and order != "atc":
        raise ValueError(f"order={order!r}: expected 'atc' where momentum is mixed too")
    n, B = cluster.workers, cluster.gossip_buckets
    compute = cluster.draw_compute_ms(steps, seed)
    updates = cluster.update_ms * (np.arange(1, B + 1) / B)[:, None]  # of buckets 0..b
    ended, launched = np.zeros(n), np.zeros((B, n))
    busy = Busy.nothing(n)
    begin = 0.0
    for t in range(steps):
        if t == discarded:
            begin = ended.mean()
        computed = ended + compute[t]
        if momentum:
            computed = _travel(np.tile(computed, (B, 1)), busy, even(t), odd and odd(t)).max(axis=0)
        if order == "atc":
            ended = _travel(computed + updates, busy, even(t), odd and odd(t)).max(axis=0)
            continue
        done = np.maximum(_travel(launched, busy, even(t), odd and odd(t)), computed)
        # T(b) = max over a <= b of D(a) + (b + 1 - a) u/B, as a running maximum
        launched = np.maximum.accumulate(done - updates + updates[0], axis=0) + updates
        ended = launched[-1]
    return _times(ended.mean() - begin, compute[discarded:], cluster)


def _simulate_local_steps(
    cluster: Cluster,
    even: Callable[[int], RoundTime],
    odd: Callable[[int], RoundTime] | None,
    local: LocalSteps,
    steps: int,
    discarded: int,
    seed: int,
) -> Times:
    """Simulate gossip in which round r, of H local steps, takes `even(r)`, or for odd buckets `odd(r)` if given.

    A worker launches a round's messages when it begins the round and waits for them before its update number tau; with
    tau = 0 it does both after the H-th. Fragments, each with an equal share of the buckets, take turns. The outer step
    takes no time here, and `local.start` is not simulated. Raises ValueError for more fragments than buckets.
    """
    if local.fragments > cluster.gossip_buckets:
        raise ValueError(f"fragments={local.fragments}: expected at most the {cluster.gossip_buckets} buckets")
    local = replace(local, start=0)
    n, B = cluster.workers, cluster.gossip_buckets
    rounds = max(FEWEST_ROUNDS, -(-(steps - discarded) // local.steps))
    steps = discarded + rounds * local.steps
    compute = cluster.draw_compute_ms(steps, seed)
    sizes = np.bincount(np.arange(B) * local.fragments // B, minlength=local.fragments)  # in buckets
    ended, begin = np.zeros(n), 0.0
    launched = np.zeros((local.fragments, n))
    busy = Busy.nothing(n)

    def arrived(fragment: int, at: np.ndarray, t: int) -> np.ndarray:
        """Return when a fragment's round, launched at these times, has reached each worker."""
        round_ = local.merged(t, fragment)
        buckets = np.tile(at, (sizes[fragment], 1))
        return _travel(buckets, busy, even(round_), odd and odd(round_)).max(axis=0)

    for t in range(steps):
        if t == discarded:
            begin = ended.mean()
        launched[local.beginning(t)] = ended
        ended = ended + compute[t]
        for fragment in local.merging(t):
            ended = np.maximum(ended, arrived(fragment, launched[fragment], t))
        ended = ended + cluster.update_ms
        if local.merge_after == 0:
            for fragment in local.ending(t):
                ended = np.maximum(ended, arrived(fragment, ended, t))
    return _times(ended.mean() - begin, compute[discarded:], cluster)


def _travel(launched: np.ndarray, busy: Busy, even: RoundTime, odd: RoundTime | None) -> np.ndarray:
    if odd is None or len(launched) == 1:
        return even(launched, busy)
    # In the queues of links that workers share, the odd half's messages follow the even half's. Elsewhere the halves do
    # not see each other's messages of this step; both occupy the links from the next step on.
    other = replace(busy)
    done = np.empty_like(launched)
    done[::2] = even(launched[::2], busy)
    other.sent, other.received = busy.sent, busy.received
    done[1::2] = odd(launched[1::2], other)
    busy.sent, busy.received = other.sent, other.received
    busy.across = np.maximum(busy.across, other.across)
    busy.inside = np.maximum(busy.inside, other.inside)
    return done


def simulate_allreduce(cluster: Cluster, *, steps: int = STEPS, discarded: int = DISCARDED, seed: int = 0) -> Times:
    """Simulate all-reduce of gradients in equal buckets, as in DistributedDataParallel.

    Bucket b of B is ready on a worker after (b + 1) / B of its backward pass. It is sent when all workers are ready and
    the previous bucket has arrived; the update follows the last one.
    """
    compute = cluster.draw_compute_ms(steps, seed)
    share = (1 - cluster.backward_share) + cluster.backward_share * np.arange(1, cluster.buckets + 1) / cluster.buckets
    duration = allreduce_ms(cluster, cluster.payload_mb / cluster.buckets)
    ended = begin = 0.0
    for t in range(steps):
        if t == discarded:
            begin = ended
        slowest = compute[t].max()
        arrived = ended
        for part in share:
            arrived = max(arrived, ended + part * slowest) + duration
        ended = arrived + cluster.update_ms
    return _times(ended - begin, compute[discarded:], cluster)


def _times(total: float, compute: np.ndarray, cluster: Cluster) -> Times:
    return Times(total / len(compute), compute.mean() + cluster.update_ms)
