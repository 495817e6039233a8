"""How long a step takes on a cluster, by all-reduce and by gossip, before anything runs there."""

from common.runtime.cluster import Cluster
from common.runtime.exchange import Busy, complete, exchange_of
from common.runtime.network import allreduce_ms
from common.runtime.steps import Times, simulate_allreduce, simulate_exchanges, simulate_gossip

__all__ = [
    "Busy",
    "Cluster",
    "Times",
    "allreduce_ms",
    "complete",
    "exchange_of",
    "simulate_allreduce",
    "simulate_exchanges",
    "simulate_gossip",
]
