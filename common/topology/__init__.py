"""Gossip topologies: who mixes with whom at which step. Pure mathematics, no processes.

    topology = build("one_peer_exponential", world_size=16)
    topology.matrix(3)          # W(3), float64 [16, 16]
    topology.spectral_gap()

`python -m common.topology aer world_size=16 workers_per_host=4` prints a schedule and what it costs.
"""

from common.topology.analysis import (
    contraction,
    is_connected,
    period_contraction,
    rounds_to_consensus,
    spectral_gap,
)
from common.topology.cost import (
    Transport,
    allreduce_messages,
    bytes_leaving_host,
    bytes_sent,
    messages_sent,
    transport_of,
)
from common.topology.phases import PHASES, in_phases
from common.topology.push_sum import push_sum, weights_of
from common.topology.registry import NAMES, build, knows_hosts
from common.topology.round import Round
from common.topology.topology import Topology

__all__ = [
    "NAMES",
    "PHASES",
    "Round",
    "Topology",
    "Transport",
    "allreduce_messages",
    "build",
    "bytes_leaving_host",
    "bytes_sent",
    "contraction",
    "in_phases",
    "is_connected",
    "knows_hosts",
    "messages_sent",
    "period_contraction",
    "push_sum",
    "rounds_to_consensus",
    "spectral_gap",
    "transport_of",
    "weights_of",
]
