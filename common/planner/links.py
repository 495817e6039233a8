"""Links as queues: the times at which messages that share them arrive."""

import numpy as np

from common.planner.cluster import Cluster


def mb_ms(megabytes: float, gbps: float) -> float:
    """Return the milliseconds that `megabytes` take at `gbps` Gbit/s."""
    return 8 * megabytes / gbps


def allreduce_ms(cluster: Cluster, megabytes: float) -> float:
    """Return the time of a ring all-reduce over all workers: 2 (n-1)/n M/B + 2 (n-1) L.

    M is `megabytes`, B the rate of the slowest link on the ring, which enters and leaves each host once, L the latency.
    The published model (arXiv 2110.13363) rounds this to 2 M/B + 2 n L.
    """
    n = cluster.workers
    if n == 1:
        return 0.0
    inside, across = cluster.inside_gbps, cluster.link_gbps.min()
    rate = inside if cluster.hosts == 1 else min(across, inside) if cluster.workers_per_host > 1 else across
    latency_us = cluster.intra_latency_us if cluster.hosts == 1 else cluster.latency_us
    return mb_ms(2 * (n - 1) / n * megabytes, rate) + 2 * (n - 1) * latency_us / 1000


# A message in a queue: messages are served in the order of `turn`; `ready` is the earliest time at which one may begin,
# `duration` for how long it occupies its queue, and `end` when it leaves, as far as is known.
MESSAGE = np.dtype([("turn", float), ("ready", float), ("duration", float), ("queue", int), ("end", float)])
NONE = np.empty(0, MESSAGE)


def serve(
    ready: np.ndarray, duration: np.ndarray, node: np.ndarray, before: np.ndarray = NONE, shared: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Send messages through queues, each of which serves one message at a time.

    ready:    [buckets, edges], earliest time at which bucket b of edge e may begin
    duration: [edges], for how long a bucket of edge e occupies its queue
    node:     [edges], the queue of edge e
    before:   [messages], those of earlier steps that may still be in the queues (workers of a host need not be in step)
    shared:   whether other edges may use a queue in other steps; if not, `before` and the messages returned are empty

    Returns begin and end of each message, [buckets, edges], and all messages, to be passed as `before` next time.

    Messages are served in the order in which each edge would send them on its own: edges that begin at the same time
    take turns, like connections that share a link.
    """
    end = queue(ready, duration)
    alone = len(np.unique(node)) == len(node) and not len(before)  # a queue for each edge
    if alone and not shared:
        return end - duration, end, NONE
    shape = ready.shape
    start = (end - duration).ravel()
    every = np.empty(ready.size, MESSAGE)
    every["turn"], every["ready"], every["end"] = start, start if alone else ready.ravel(), end.ravel()
    every["duration"], every["queue"] = (np.broadcast_to(values, shape).ravel() for values in (duration, node))
    if alone:
        return end - duration, end, every
    every = np.concatenate([every, before])
    order = np.argsort(every["queue"] * (np.ptp(every["turn"]) + 1.0) + every["turn"], kind="stable")
    durations = every["duration"][order]
    # Within a queue: end_k = max_{j <= k} (ready_j + d_j + ... + d_k), as a running maximum.
    heads = np.flatnonzero(np.diff(every["queue"][order], prepend=-1))
    lengths = np.diff(heads, append=len(order))
    done_before = np.cumsum(durations) - durations
    done_before -= np.repeat(done_before[heads], lengths)
    slack = every["ready"][order] - done_before
    # One running maximum for all queues: each is lifted above the one before.
    lift = np.repeat(np.arange(len(heads)) * (np.ptp(slack) + 1.0), lengths)
    start = np.empty(len(order))
    start[order] = np.maximum.accumulate(slack + lift) - lift + done_before
    every["ready"], every["end"] = start, start + every["duration"]
    start = start[: ready.size].reshape(shape)
    return start, start + duration, every


def queue(ready: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """Return the times at which buckets leave a queue that serves one after another, [buckets, queues].

    ready: [buckets, queues], earliest time at which each may begin; duration: [queues], of one bucket
    """
    number = np.arange(len(ready))[:, None]
    return np.maximum.accumulate(ready - number * duration, axis=0) + (number + 1) * duration
