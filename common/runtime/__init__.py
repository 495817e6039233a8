"""How long a step takes on a cluster, by all-reduce and by gossip, before anything runs there."""

from common.runtime.cluster import Cluster
from common.runtime.network import allreduce_ms, round_ms
from common.runtime.steps import Times, simulate_allreduce, simulate_gossip

__all__ = ["Cluster", "Times", "allreduce_ms", "round_ms", "simulate_allreduce", "simulate_gossip"]
