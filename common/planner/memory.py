"""Predicts what a rank sends in a round and how much memory its tensors take, before anything runs.

Only sizes that follow from the size of the parameters are counted: no activations, no layers that FSDP gathers
temporarily, and nothing that libraries allocate.
"""

from common.options import LocalSteps
from common.planner.cluster import Cluster
from common.topology import Round, Topology, Transport, bytes_sent, transport_of

STATE = {"sgd": 1, "adamw": 2, "accumadamw": 3}  # state vectors as large as the parameters; sgd has momentum


def rank_memory(
    cluster: Cluster, optimizer: str, topology: Topology | None = None, local: LocalSteps | None = None
) -> dict[str, float]:
    """Predict how many MB (1e6 bytes) of tensors a rank holds under gossip; they all have one dtype.

    optimizer: a key of STATE
    topology:  None: all workers average in every round

    Returns sizes by name; "outer" are anchors and outer momenta of local steps, "messages" receive buffers.
    """
    part = cluster.payload_mb / cluster.shards
    outer = local.keeps_anchors + bool(local.outer.momentum) if local is not None else 0
    vectors = {"parameters": 1, "gradients": 1, "optimizer": STATE[optimizer], "outer": outer}
    vectors["messages"] = received(cluster, topology)
    return {name: count * part for name, count in vectors.items()}


def received(cluster: Cluster, topology: Topology | None) -> float:
    """Return the peak size of the receive buffers of a round, relative to the rank's share of the parameters."""
    if topology is None:
        return float(cluster.workers > 1)
    return max(_received(round_, cluster.workers_per_host) for round_ in _rounds(topology))


def sent_mb(cluster: Cluster, topology: Topology | None) -> float:
    """Return the MB that a rank sends in a round, averaged over ranks and rounds; no topology: all workers average."""
    part, n = cluster.payload_mb / cluster.shards, cluster.workers
    if topology is None:
        return 2 * (n - 1) / n * part
    rounds = _rounds(topology)
    total = sum(bytes_sent(r, i, part, None, cluster.workers_per_host) for r in rounds for i in range(n))
    return total / n / len(rounds)


def _rounds(topology: Topology) -> list[Round]:
    return [topology.round(t) for t in range(topology.period or 1)]


def _received(round_: Round, workers_per_host: int) -> float:
    match transport_of(round_, workers_per_host):
        case Transport.IDLE:
            return 0.0
        case Transport.SUBGROUP:
            return 1.0  # the sum
        case Transport.HIERARCHICAL:  # the average, and the messages for one shard of it from other hosts
            between = round_.between_hosts(workers_per_host)
            by_messages = transport_of(between) is Transport.SEND_RECV
            return 1.0 + (_received(between, 1) / workers_per_host if by_messages else 0.0)
        case _:
            return float(max(len(round_.in_peers(i)) for i in range(round_.world_size)))
