"""The time that a gossip round takes on a cluster, bucket by bucket: a timing model of `common.parallel`'s transports.

A round is a function of `launched` [buckets, workers], the times at which workers launch their buckets (receives are
posted, parameters are final), and of `busy`, which says how long earlier messages occupy links. It returns `done`
[buckets, workers], the times at which a worker has sent and received everything. A message begins when both of its ends
have launched the bucket: neither gloo nor NCCL sends before the receive is posted.

The papers do not model this; the assumptions are ours:

- A link serves one message at a time; the messages of several workers take turns.
- A collective occupies the links of its members for as long as its bytes take there; the latency of its hops is hidden
  behind the next bucket. Groups that share a link share its rate.
- Links inside a host and links between hosts do not slow each other down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.planner.cluster import Cluster
from common.planner.links import NONE, mb_ms, queue, serve
from common.topology import Round, Transport, bytes_leaving_hosts, transport_of


@dataclass
class Busy:
    """How long earlier messages occupy the links.

    across, inside: [workers], end of a worker's earlier messages between hosts, and inside its host
    sent, received: messages of earlier steps between hosts, in the queues of their senders and receivers
    """

    across: np.ndarray
    inside: np.ndarray
    sent: np.ndarray
    received: np.ndarray

    @classmethod
    def nothing(cls, workers: int) -> "Busy":
        """Return the state before the first step."""
        return cls(np.zeros(workers), np.zeros(workers), NONE, NONE)


RoundTime = Callable[[np.ndarray, Busy], np.ndarray]


def round_time(cluster: Cluster, round_: Round, *, flat: bool = False) -> RoundTime:
    """Return the time of this round, sent in buckets of payload_mb / gossip_buckets.

    It is sent hierarchically if possible, unless `flat`: then each worker sends its whole vector.
    """
    match transport_of(round_, 1 if flat else cluster.workers_per_host):
        case Transport.HIERARCHICAL:
            return hierarchical(cluster, round_.between_hosts(cluster.workers_per_host))
        case Transport.IDLE:
            return idle
        case Transport.SUBGROUP:
            return subgroups(cluster, round_)
        case _:
            return send_recv(cluster, round_)


def idle(launched: np.ndarray, busy: Busy) -> np.ndarray:
    """Return `launched`: nothing is sent."""
    return launched


def complete(cluster: Cluster, *, flat: bool = False) -> RoundTime:
    """Return the time of averaging over all workers, like `round_time` but without the n^2 weights of the round."""
    hosts, L = cluster.hosts, cluster.workers_per_host
    if cluster.workers == 1:
        return idle
    if hosts > 1 and L > 1 and not flat:
        return hierarchical(cluster, Round.from_groups([range(hosts)], hosts))
    n, everybody = cluster.workers, np.arange(cluster.workers)
    leaving = dict.fromkeys(range(hosts), 2 * (n - 1) / n) if hosts > 1 else {}
    return _groups(cluster, [everybody], leaving)


def send_recv(cluster: Cluster, round_: Round) -> RoundTime:
    """Return the time of point-to-point messages: inside a host on the workers' own links, else on the hosts' links."""
    edges = np.array([(i, j) for i in range(round_.world_size) for j in round_.out_peers(i)])
    host = edges // cluster.workers_per_host
    crossing = host[:, 0] != host[:, 1]
    across = _across(cluster, edges[crossing], host[crossing], shared=cluster.workers_per_host > 1)
    within = edges[~crossing]
    own = np.full(len(within), mb_ms(cluster.gossip_bucket_size_mb, cluster.inside_gbps))
    inside = _Edges(within, within, own, own, cluster.intra_latency_us, shared=False)

    def run(launched: np.ndarray, busy: Busy) -> np.ndarray:
        done, busy.sent, busy.received = across.send(launched, busy.across, busy.sent, busy.received)
        inner, *_ = inside.send(launched, busy.inside)
        busy.across = across.last(done, busy.across)
        busy.inside = inside.last(inner, busy.inside)
        return np.maximum(done, inner)

    return run


def subgroups(cluster: Cluster, round_: Round) -> RoundTime:
    """Return the time of a ring all-reduce in each group."""
    leaving = bytes_leaving_hosts(round_, cluster.workers_per_host, 1.0, Transport.SUBGROUP)
    return _groups(cluster, [np.array(group) for group in round_.groups], leaving)


def hierarchical(cluster: Cluster, between: Round) -> RoundTime:
    """Return the time of a round M (x) J_L/L, where `between` is M over hosts, in three phases whose buckets overlap.

    First a reduce-scatter inside each host. Then worker l of a host exchanges its shard of 1/L with worker l of its
    peers in M: by all-reduce if M averages uniformly in groups of H > 2 hosts, else point to point. Finally an
    all-gather inside each host. A host sends 2 (H-1)/H payloads with all-reduce, else its out-degree in M.
    """
    if transport_of(between) is Transport.SUBGROUP:
        groups = [np.array(group) for group in between.groups]
        sizes = np.array([len(hosts) for hosts in groups])
        slowest = np.array([cluster.link_gbps[hosts].min() for hosts in groups])
        durations = mb_ms(2 * (sizes - 1) / sizes * cluster.gossip_bucket_size_mb, slowest)
        return _hierarchical(cluster, _mean_of_groups(groups, durations, 2 * (sizes - 1) * cluster.latency_us / 1000))
    edges = np.array([(h, g) for h in range(between.world_size) for g in between.out_peers(h)])
    shards = _across(cluster, edges, edges, shared=False)  # L workers with a shard of 1/L each
    return _hierarchical(cluster, lambda launched, busy: shards.send(launched, busy)[0])


@dataclass(frozen=True)
class _Edges:
    """Point-to-point messages between agents, which are workers or hosts.

    edges:         [edges, 2], sender and receiver
    queues:        [edges, 2], the queues that the message occupies at its two ends
    out_ms, in_ms: [edges], for how long each bucket occupies them
    shared:        whether several agents use one queue; if not, `busy` alone tells when it is free
    """

    edges: np.ndarray
    queues: np.ndarray
    out_ms: np.ndarray
    in_ms: np.ndarray
    latency_us: float
    shared: bool

    def send(
        self, launched: np.ndarray, busy: np.ndarray, sent: np.ndarray = NONE, received: np.ndarray = NONE
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return when each agent is done, [buckets, agents]: `launched` where it neither sends nor receives.

        sent, received: messages of earlier steps in both kinds of queues; returned along with the messages of this step
        """
        sent, received = (messages[messages["end"] > launched.min()] for messages in (sent, received))
        if not len(self.edges):
            return launched, sent, received
        sender, receiver = self.edges.T
        begin = np.maximum(launched, busy)
        ready = np.maximum(begin[:, sender], begin[:, receiver])
        start, left, sent = serve(ready, self.out_ms, self.queues[:, 0], sent, self.shared)
        _, arrived, received = serve(start, self.in_ms, self.queues[:, 1], received, self.shared)
        arrived = np.maximum(arrived, left)
        done = launched.copy()
        for late, (agents, order, starts) in zip((0.0, self.latency_us / 1000), self._agents, strict=True):
            latest = np.maximum.reduceat(arrived[:, order], starts, axis=1) + late
            done[:, agents] = np.maximum(done[:, agents], latest)
        return done, sent, received

    @cached_property
    def _agents(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        # For senders and for receivers: their numbers, the edges sorted by them, and where each agent's edges begin.
        found = []
        for end in self.edges.T:
            agents, starts = np.unique(np.sort(end), return_index=True)
            found.append((agents, np.argsort(end, kind="stable"), starts))
        return found

    def last(self, done: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Return the end of each agent's messages, [agents]; `busy` where it has none."""
        agents = np.unique(self.edges)
        through = busy.copy()
        through[agents] = np.maximum(through[agents], done.max(axis=0)[agents])
        return through


def _across(cluster: Cluster, edges: np.ndarray, hosts: np.ndarray, *, shared: bool) -> _Edges:
    """Return the messages along `edges`, which occupy the links of `hosts` [edges, 2]."""
    ms_of_link = mb_ms(cluster.gossip_bucket_size_mb, cluster.link_gbps)
    return _Edges(edges, hosts, ms_of_link[hosts[:, 0]], ms_of_link[hosts[:, 1]], cluster.latency_us, shared)


def _groups(cluster: Cluster, groups: list[np.ndarray], leaving: dict[int, float]) -> RoundTime:
    """Return the time of ring all-reduces in disjoint groups of workers.

    leaving: {host: number of payloads that it sends to other hosts}
    """
    bucket = cluster.gossip_bucket_size_mb
    busy_link = {h: mb_ms(share * bucket, cluster.link_gbps[h]) for h, share in leaving.items()}
    durations, latencies, crosses = [], [], []
    for members in groups:
        g, hosts = len(members), {int(worker) // cluster.workers_per_host for worker in members}
        crosses.append(len(hosts) > 1)
        # If all neighbours on the ring are on different hosts, nothing is sent inside.
        inside = mb_ms(2 * (g - 1) / g * bucket, cluster.inside_gbps) if g > len(hosts) else 0.0
        between = max(busy_link[h] for h in hosts) if crosses[-1] else 0.0
        latency_us = cluster.latency_us if crosses[-1] else cluster.intra_latency_us
        durations.append(max(inside, between))
        latencies.append(2 * (g - 1) * latency_us / 1000)
    mean = _mean_of_groups(groups, np.array(durations), np.array(latencies))
    through_link = np.zeros(cluster.workers, dtype=bool)
    for members, crossing in zip(groups, crosses, strict=True):
        through_link[members] = crossing

    def run(launched: np.ndarray, busy: Busy) -> np.ndarray:
        done = mean(launched, np.where(through_link, busy.across, busy.inside))
        last = done.max(axis=0)
        busy.across = np.where(through_link, np.maximum(busy.across, last), busy.across)
        busy.inside = np.where(through_link, busy.inside, np.maximum(busy.inside, last))
        return done

    return run


def _mean_of_groups(
    groups: list[np.ndarray], durations: np.ndarray, latencies: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the time of collectives in disjoint groups of agents.

    durations: [groups], for how long a bucket occupies the links
    latencies: [groups], which delay a bucket's end but not the next bucket
    """
    order = np.concatenate(groups)
    sizes = np.array([len(group) for group in groups])
    starts = np.cumsum(sizes) - sizes

    def run(launched: np.ndarray, busy: np.ndarray) -> np.ndarray:
        begin = np.maximum(launched, busy)
        ended = queue(np.maximum.reduceat(begin[:, order], starts, axis=1), durations) + latencies
        ended = np.where(sizes > 1, ended, launched[:, order[starts]])
        done = np.empty_like(launched)
        done[:, order] = np.repeat(ended, sizes, axis=1)
        return done

    return run


def _hierarchical(cluster: Cluster, between: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> RoundTime:
    L = cluster.workers_per_host
    phase = (
        mb_ms((L - 1) / L * cluster.gossip_bucket_size_mb, cluster.inside_gbps)
        + (L - 1) * cluster.intra_latency_us / 1000
    )
    inside_ms = np.full(cluster.hosts, phase)

    def run(launched: np.ndarray, busy: Busy) -> np.ndarray:
        begin = np.maximum(launched, busy.inside).reshape(len(launched), -1, L).max(axis=2)
        scattered = queue(begin, inside_ms)
        exchanged = between(scattered, busy.across[::L])
        # The all-gathers queue behind the reduce-scatters, which use the same links.
        gathered = queue(np.maximum(exchanged, scattered[-1]), inside_ms)
        busy.across = np.maximum(busy.across, np.repeat(exchanged.max(axis=0), L))
        busy.inside = np.maximum(busy.inside, np.repeat(gathered[-1], L))
        return np.repeat(gathered, L, axis=1)

    return run
