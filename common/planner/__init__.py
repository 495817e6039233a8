"""Predicts the time of a step on a cluster, with all-reduce and with gossip, before anything runs there."""

from common.planner.cluster import Cluster
from common.planner.steps import simulate_allreduce, simulate_gossip

__all__ = ["Cluster", "simulate_allreduce", "simulate_gossip"]
