"""Prediction of the time of a step on a cluster, by all-reduce and by gossip, before anything runs there."""

from common.planner.cluster import Cluster
from common.planner.links import allreduce_ms
from common.planner.round_time import Busy, complete, round_time
from common.planner.steps import Times, simulate_allreduce, simulate_gossip, simulate_rounds

__all__ = [
    "Busy",
    "Cluster",
    "Times",
    "allreduce_ms",
    "complete",
    "round_time",
    "simulate_allreduce",
    "simulate_gossip",
    "simulate_rounds",
]
