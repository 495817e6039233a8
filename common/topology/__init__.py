"""Gossip topologies: who mixes with whom at which step. Pure mathematics, no processes.

    topology = build("one_peer_exponential", world_size=16)
    topology.matrix(3)          # W(3), float64 [16, 16]
    topology.spectral_gap()

`python -m common.topology aer world_size=16 workers_per_host=4` prints a schedule and what it costs.
"""

from common.topology.cost import (
    Transport,
    allreduce_messages,
    bytes_leaving_hosts,
    bytes_sent,
    messages_sent,
    transport_of,
)
from common.topology.families import NAMES, build, knows_hosts
from common.topology.round import Round
from common.topology.schedule import in_phases, push_sum, staggered, weights_of
from common.topology.topology import Topology

__all__ = [
    "NAMES",
    "Round",
    "Topology",
    "Transport",
    "allreduce_messages",
    "build",
    "bytes_leaving_hosts",
    "bytes_sent",
    "in_phases",
    "knows_hosts",
    "messages_sent",
    "push_sum",
    "staggered",
    "transport_of",
    "weights_of",
]
