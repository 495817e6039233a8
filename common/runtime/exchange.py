"""When a round's messages have arrived, bucket by bucket: the transports of `common.parallel` in time.

An exchange is called with `launched` [buckets, ranks], the moments when ranks launch their buckets (receives are
posted and parameters final), and `busy`, what earlier messages still occupy; it returns `done` [buckets, ranks], the
moments when a rank has all that it waits for, its own sends included. A message begins when both of its ends have
launched the bucket, as neither gloo nor NCCL sends before the receive is posted.

No paper at hand models this; what is ours: a link works on one message at a time, messages of several ranks in turns;
a collective occupies the links of its members for the time that its bytes take there (the latency of its hops is hidden
by the next bucket); groups that share a link share its rate; and the links inside a host and those between hosts do not
slow each other down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from common.runtime.cluster import Cluster
from common.runtime.network import NONE, Messages, mb_ms, queue, serve
from common.topology import Round
from common.topology.cost import Transport, bytes_leaving_hosts, transport_of


@dataclass
class Busy:
    """What earlier messages still occupy.

    across, inside: [ranks], when the messages between hosts, and inside, that a rank launched before are through
    sent, received: of earlier steps, between hosts, in the queues of their sources and targets
    """

    across: np.ndarray
    inside: np.ndarray
    sent: Messages = NONE
    received: Messages = NONE

    @classmethod
    def nothing(cls, ranks: int) -> "Busy":
        """Before the first step."""
        return cls(np.zeros(ranks), np.zeros(ranks))


Exchange = Callable[[np.ndarray, Busy], np.ndarray]
Route = Literal["auto", "flat"]  # hierarchical where the round allows it, or never


def exchange_of(cluster: Cluster, round_: Round, route: Route = "auto") -> Exchange:
    """How this round travels on this cluster, in buckets of payload_mb / gossip_buckets."""
    match transport_of(round_, cluster.workers_per_host if route == "auto" else 1):
        case Transport.HIERARCHICAL:
            return hierarchical(cluster, round_.between_hosts(cluster.workers_per_host))
        case Transport.IDLE:
            return idle
        case Transport.SUBGROUP:
            return subgroups(cluster, round_)
        case _:
            return send_recv(cluster, round_)


def idle(launched: np.ndarray, busy: Busy) -> np.ndarray:
    """Nothing travels."""
    return launched


def complete(cluster: Cluster, route: Route = "auto") -> Exchange:
    """Everybody averages with everybody: what `exchange_of` gives, without the n^2 weights of its round."""
    hosts, L = cluster.hosts, cluster.workers_per_host
    if cluster.ranks == 1:
        return idle
    if hosts > 1 and L > 1 and route == "auto":
        return hierarchical(cluster, Round.from_groups([range(hosts)], hosts))
    n, everybody = cluster.ranks, np.arange(cluster.ranks)
    leaving = dict.fromkeys(range(hosts), 2 * (n - 1) / n) if hosts > 1 else {}
    return _groups(cluster, [everybody], leaving)


def send_recv(cluster: Cluster, round_: Round) -> Exchange:
    """Point-to-point messages: those inside of a host occupy its ranks' own links, the others the hosts' links."""
    edges = np.array([(i, j) for i in range(round_.world_size) for j in round_.out_peers(i)])
    host = edges // cluster.workers_per_host
    crossing = host[:, 0] != host[:, 1]
    across = _across(cluster, edges[crossing], host[crossing], shared=cluster.workers_per_host > 1)
    within = edges[~crossing]
    own = np.full(len(within), mb_ms(_bucket_mb(cluster), cluster.intra_gbps))
    inside = _Edges(within, within, own, own, cluster.intra_latency_us, shared=False)

    def exchange(launched: np.ndarray, busy: Busy) -> np.ndarray:
        done, busy.sent, busy.received = across.send(launched, busy.across, busy.sent, busy.received)
        inner, *_ = inside.send(launched, busy.inside)
        busy.across = across.last(done, busy.across)
        busy.inside = inside.last(inner, busy.inside)
        return np.maximum(done, inner)

    return exchange


def subgroups(cluster: Cluster, round_: Round) -> Exchange:
    """A ring all-reduce in every group."""
    leaving = bytes_leaving_hosts(round_, cluster.workers_per_host, 1.0, Transport.SUBGROUP)
    return _groups(cluster, [np.array(group) for group in round_.groups], leaving)


def hierarchical(cluster: Cluster, between: Round) -> Exchange:
    """A round M (x) J_L/L, `between` being M over hosts, in three phases whose buckets overlap.

    A reduce-scatter inside of each host; rank l exchanges its shard of 1/L with rank l of the hosts that M names (an
    all-reduce along this rail where M averages uniformly in groups of more than two hosts); an all-gather inside.
    A host sends its out-degree in M, or 2 (H-1)/H, times the payload.
    """
    if transport_of(between) is Transport.SUBGROUP:
        return _hierarchical(cluster, _rails(cluster, [np.array(group) for group in between.groups]))
    edges = np.array([(h, g) for h in range(between.world_size) for g in between.out_peers(h)])
    rails = _across(cluster, edges, edges, shared=False)  # L ranks with a shard of 1/L each
    return _hierarchical(cluster, lambda launched, busy: rails.send(launched, busy)[0])


@dataclass(frozen=True)
class _Edges:
    """Point-to-point messages between agents, which are ranks or hosts.

    edges: [edges, 2], sender and receiver; queues: [edges, 2], which of them the message occupies at both ends;
    out_ms, in_ms: [edges], for how long by each bucket; shared: whether several agents use a queue (if not, `busy` says
    all about what it has to do)
    """

    edges: np.ndarray
    queues: np.ndarray
    out_ms: np.ndarray
    in_ms: np.ndarray
    latency_us: float
    shared: bool

    def send(
        self, launched: np.ndarray, busy: np.ndarray, sent: Messages = NONE, received: Messages = NONE
    ) -> tuple[np.ndarray, Messages, Messages]:
        """When each agent is through, [buckets, agents]; `launched` where it neither sends nor receives.

        sent, received: messages of earlier steps in both kinds of queues; also returned, with those of this one.
        """
        sent, received = sent.after(launched.min()), received.after(launched.min())
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
        # Of senders and receivers: who they are, the edges in their order, and where each one's begin.
        found = []
        for end in self.edges.T:
            agents, starts = np.unique(np.sort(end), return_index=True)
            found.append((agents, np.argsort(end, kind="stable"), starts))
        return found

    def last(self, done: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """When each agent's messages are through, [agents]; `busy` of those that have none."""
        agents = np.unique(self.edges)
        through = busy.copy()
        through[agents] = np.maximum(through[agents], done.max(axis=0)[agents])
        return through


def _across(cluster: Cluster, edges: np.ndarray, hosts: np.ndarray, *, shared: bool) -> _Edges:
    """Messages between `hosts` [edges, 2]."""
    ms_of_link = mb_ms(_bucket_mb(cluster), cluster.link_gbps)
    return _Edges(edges, hosts, ms_of_link[hosts[:, 0]], ms_of_link[hosts[:, 1]], cluster.latency_us, shared)


def _groups(cluster: Cluster, groups: list[np.ndarray], leaving: dict[int, float]) -> Exchange:
    """Ring all-reduces in disjoint groups of ranks; leaving: {host: payloads that it sends to others in all}."""
    bucket = _bucket_mb(cluster)
    busy_link = {h: mb_ms(share * bucket, cluster.link_gbps[h]) for h, share in leaving.items()}
    durations, latencies, crosses = [], [], []
    for members in groups:
        g, hosts = len(members), {int(rank) // cluster.workers_per_host for rank in members}
        crosses.append(len(hosts) > 1)
        # No two neighbours of the ring on one host: nothing travels inside.
        inside = mb_ms(2 * (g - 1) / g * bucket, cluster.intra_gbps) if g > len(hosts) else 0.0
        between = max(busy_link[h] for h in hosts) if crosses[-1] else 0.0
        latency_us = cluster.latency_us if crosses[-1] else cluster.intra_latency_us
        durations.append(max(inside, between))
        latencies.append(2 * (g - 1) * latency_us / 1000)
    mean = _mean_of_groups(groups, np.array(durations), np.array(latencies))
    through_link = np.zeros(cluster.ranks, dtype=bool)
    for members, crossing in zip(groups, crosses, strict=True):
        through_link[members] = crossing

    def exchange(launched: np.ndarray, busy: Busy) -> np.ndarray:
        done = mean(launched, np.where(through_link, busy.across, busy.inside))
        last = done.max(axis=0)
        busy.across = np.where(through_link, np.maximum(busy.across, last), busy.across)
        busy.inside = np.where(through_link, busy.inside, np.maximum(busy.inside, last))
        return done

    return exchange


def _mean_of_groups(
    groups: list[np.ndarray], durations: np.ndarray, latencies: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Collectives of disjoint groups of agents: their links are occupied for `durations` [groups] by each bucket.

    A bucket's latency does not keep the next one waiting.
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


def _rails(cluster: Cluster, groups: list[np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The all-reduces of the L shards of a bucket in disjoint groups of hosts."""
    sizes = np.array([len(hosts) for hosts in groups])
    slowest = np.array([cluster.link_gbps[hosts].min() for hosts in groups])
    durations = mb_ms(2 * (sizes - 1) / sizes * _bucket_mb(cluster), slowest)
    return _mean_of_groups(groups, durations, 2 * (sizes - 1) * cluster.latency_us / 1000)


def _hierarchical(cluster: Cluster, rails: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Exchange:
    L = cluster.workers_per_host
    phase = mb_ms((L - 1) / L * _bucket_mb(cluster), cluster.intra_gbps) + (L - 1) * cluster.intra_latency_us / 1000
    inside_ms = np.full(cluster.hosts, phase)

    def exchange(launched: np.ndarray, busy: Busy) -> np.ndarray:
        begin = np.maximum(launched, busy.inside).reshape(len(launched), -1, L).max(axis=2)
        scattered = queue(begin, inside_ms)
        exchanged = rails(scattered, busy.across[::L])
        # The all-gathers queue behind the reduce-scatters: the same ranks, the same links.
        gathered = queue(np.maximum(exchanged, scattered[-1]), inside_ms)
        busy.across = np.maximum(busy.across, np.repeat(exchanged.max(axis=0), L))
        busy.inside = np.maximum(busy.inside, np.repeat(gathered[-1], L))
        return np.repeat(gathered, L, axis=1)

    return exchange


def _bucket_mb(cluster: Cluster) -> float:
    return cluster.payload_mb / cluster.gossip_buckets
