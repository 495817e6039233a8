"""How long an exchange travels: bytes over rates, and latencies.

The published model of costs (arXiv 2110.13363: a ring all-reduce takes 2 M/B + 2 n L, a message M/B + L) with two
rates. Ours, as no paper at hand gives it: a host's ranks share its link to other hosts, exchanges inside of hosts and
between them overlap, and the slower one counts.
"""

from functools import cache

import numpy as np

from common.runtime.cluster import Cluster
from common.topology import Round
from common.topology.cost import Transport, bytes_leaving_hosts, bytes_sent, messages_sent, transport_of


def mb_ms(megabytes: float, gbps: float) -> float:
    """Milliseconds that so many MB take at so many Gbit/s."""
    return 8 * megabytes / gbps


def allreduce_ms(cluster: Cluster, megabytes: float) -> float:
    """A ring all-reduce over all ranks, which leaves and enters every host once: 2 (n-1)/n of the payload."""
    n = cluster.ranks
    if n == 1:
        return 0.0
    volume = 2 * (n - 1) / n * megabytes
    rate = cluster.intra_gbps if cluster.hosts == 1 else min(cluster.inter_gbps, cluster.intra_gbps)
    latency_ms = cluster.latency_us / 1000 if cluster.hosts > 1 else 0.0
    return mb_ms(volume, rate) + 2 * (n - 1) * latency_ms


@cache
def round_ms(cluster: Cluster, round_: Round) -> np.ndarray:
    """Milliseconds from the moment when a rank and its peers have begun until its exchange is over, [ranks].

    A group that averages (Transport.SUBGROUP) is as slow as its slowest host.
    """
    own = np.zeros(cluster.ranks)
    if transport_of(round_) is Transport.IDLE:
        return own
    leaving = bytes_leaving_hosts(round_, cluster.ranks_per_host, cluster.payload_mb, transport_of(round_))
    per_host = [mb_ms(leaving.get(host, 0.0), cluster.inter_gbps) for host in range(cluster.hosts)]
    for rank in range(cluster.ranks):
        partners = {rank, *round_.in_peers(rank), *round_.out_peers(rank)}
        hosts = {partner // cluster.ranks_per_host for partner in partners}
        inside = mb_ms(bytes_sent(round_, rank, cluster.payload_mb), cluster.intra_gbps)
        between = max(per_host[host] for host in hosts) if len(hosts) > 1 else 0.0
        latency_ms = messages_sent(round_, rank) * cluster.latency_us / 1000 if len(hosts) > 1 else 0.0
        own[rank] = max(inside, between) + latency_ms
    return own
