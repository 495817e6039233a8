"""Links as queues: when messages that share them are through."""

from dataclasses import dataclass, replace

import numpy as np

from common.runtime.cluster import Cluster


def mb_ms(megabytes: float, gbps: float) -> float:
    """Milliseconds that so many MB take at so many Gbit/s."""
    return 8 * megabytes / gbps


def allreduce_ms(cluster: Cluster, megabytes: float) -> float:
    """A ring all-reduce over all ranks, which leaves and enters every host once: 2 (n-1)/n of the payload.

    The slowest link counts. Latency as in the published model (`formulas.ring_allreduce_ms`), 2 (n-1) times.
    """
    n = cluster.ranks
    if n == 1:
        return 0.0
    inside, across = cluster.intra_gbps, cluster.link_gbps.min()
    rate = inside if cluster.hosts == 1 else min(across, inside) if cluster.workers_per_host > 1 else across
    latency_us = cluster.intra_latency_us if cluster.hosts == 1 else cluster.latency_us
    return mb_ms(2 * (n - 1) / n * megabytes, rate) + 2 * (n - 1) * latency_us / 1000


@dataclass(frozen=True)
class Messages:
    """What goes through queues, [messages] each: their turn, when they may begin, how long they take, in which queue.

    end: when they are through, as far as is known
    """

    turn: np.ndarray
    ready: np.ndarray
    duration: np.ndarray
    queue: np.ndarray
    end: np.ndarray

    def after(self, time: float) -> "Messages":
        """Those that are not through by then."""
        late = self.end > time
        return self if late.all() else Messages(*(values[late] for values in self._values()))

    def _values(self) -> tuple[np.ndarray, ...]:
        return self.turn, self.ready, self.duration, self.queue, self.end

    def and_also(self, others: "Messages") -> "Messages":
        """These and others."""
        pairs = zip(self._values(), others._values(), strict=True)
        return Messages(*(np.concatenate(pair) for pair in pairs)) if len(others.queue) else self


NONE = Messages(*(np.zeros(0),) * 3, np.zeros(0, dtype=int), np.zeros(0))


def serve(
    ready: np.ndarray, duration: np.ndarray, node: np.ndarray, before: Messages = NONE, shared: bool = True
) -> tuple[np.ndarray, np.ndarray, Messages]:
    """Send messages through queues, each of which works on one message at a time.

    ready:    [buckets, edges], when bucket b of edge e may begin
    duration: [edges], how long a bucket of edge e occupies its queue
    node:     [edges], the queue of edge e
    before:   messages of earlier steps that may still be on their way, when ranks of a host have come apart
    shared:   whether other edges may use a queue in other steps; else `before` is none, and none are returned
    Returns when they begin and end, [buckets, edges], and all messages, as `before` of the next step.

    Messages are served in the order in which each edge, alone, would send them: edges that begin at the same time take
    turns, as connections share a link.
    """
    end = queue(ready, duration)
    alone = len(np.unique(node)) == len(node) and not len(before.queue)  # a queue for each edge
    if alone and not shared:
        return end - duration, end, NONE
    shape = ready.shape
    durations, nodes = (np.broadcast_to(values, shape).ravel() for values in (duration, node))
    start = (end - duration).ravel()
    every = Messages(start, start if alone else ready.ravel(), durations, nodes, end.ravel()).and_also(before)
    if alone:
        return end - duration, end, every
    order = np.argsort(every.queue * (np.ptp(every.turn) + 1.0) + every.turn, kind="stable")
    durations = every.duration[order]
    # Within a queue: end_k = max_{j <= k} (ready_j + d_j + ... + d_k), as a running maximum.
    heads = np.flatnonzero(np.diff(every.queue[order], prepend=-1))
    lengths = np.diff(heads, append=len(order))
    done_before = np.cumsum(durations) - durations
    done_before -= np.repeat(done_before[heads], lengths)
    slack = every.ready[order] - done_before
    # One running maximum for all queues: each is lifted above the one before.
    lift = np.repeat(np.arange(len(heads)) * (np.ptp(slack) + 1.0), lengths)
    start = np.empty(len(order))
    start[order] = np.maximum.accumulate(slack + lift) - lift + done_before
    every = replace(every, ready=start, end=start + every.duration)
    start = start[: ready.size].reshape(shape)
    return start, start + duration, every


def queue(ready: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """When the buckets have gone through, one after another, [buckets, queues].

    ready: [buckets, queues], when each may begin; duration: [queues], of one bucket
    """
    number = np.arange(len(ready))[:, None]
    return np.maximum.accumulate(ready - number * duration, axis=0) + (number + 1) * duration
