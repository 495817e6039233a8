"""The transport that a round gets, and the bytes and messages that it costs: the single definition of both.

Engine counters, simulator, tables and the runtime model all use it, so they cannot disagree.
Payloads are in bytes; a payload of 1.0 gives costs in units of the message size S.
"""

from enum import StrEnum

from common.topology.round import Round


class Transport(StrEnum):
    """How a round is carried out."""

    IDLE = "idle"
    SEND_RECV = "send_recv"  # each worker sends its vector to every worker that takes from it
    SUBGROUP = "subgroup"  # an all-reduce in every group
    HIERARCHICAL = "hierarchical"  # shards are summed inside each host, travel between hosts, and are gathered inside


def transport_of(round_: Round, workers_per_host: int = 1) -> Transport:
    """Return the transport that a round gets by default; worker i lives on host i // workers_per_host.

    If every host averages inside before it talks to others (`Round.between_hosts`), shards cross once per host instead
    of once per worker. Otherwise all-reduce pays off if a uniform group has more than two workers; a pair sends the
    same bytes either way, and point-to-point messages need no extra communicator.
    """
    if round_.is_idle:
        return Transport.IDLE
    if _between(round_, workers_per_host) is not None:
        return Transport.HIERARCHICAL
    if round_.groups is not None and max(map(len, round_.groups)) > 2:
        return Transport.SUBGROUP
    return Transport.SEND_RECV


def allreduce_messages(round_: Round, workers_per_host: int = 1) -> int:
    """Return the number of messages into which the round's all-reduces split their payload; 1 if it is sent whole.

    If groups differ in size, the smallest counts.
    """
    match transport_of(round_, workers_per_host):
        case Transport.SUBGROUP:
            return min(len(group) for group in round_.groups if len(group) > 1)
        case Transport.HIERARCHICAL:
            between = allreduce_messages(round_.between_hosts(workers_per_host))
            return workers_per_host * between if between > 1 else 1
        case _:
            return 1


def bytes_sent(
    round_: Round,
    worker: int,
    payload_bytes: float,
    transport: Transport | str | None = None,
    workers_per_host: int = 1,
    shard_bytes: float | None = None,
) -> float:
    """Return the bytes that `worker` hands to the network in this round.

    SEND_RECV: the payload once per worker that takes from it. SUBGROUP: a ring all-reduce, 2(g-1)/g payloads in
    a group of g. HIERARCHICAL with L workers per host: 2(L-1)/L payloads inside the host, plus what the host sends in
    the round between hosts for a payload of one L-th, or of `shard_bytes` if messages between hosts are narrower.
    `transport` overrides the default.

    Raises ValueError when the round cannot be carried out by `transport`.
    """
    match _resolve(round_, transport, workers_per_host):
        case Transport.SEND_RECV:
            return float(len(round_.out_peers(worker)) * payload_bytes)
        case Transport.SUBGROUP:
            g = len(_group_of(round_, worker))
            return 2 * (g - 1) / g * payload_bytes
        case Transport.HIERARCHICAL:
            share = payload_bytes / workers_per_host
            narrow = share if shard_bytes is None else shard_bytes
            between = bytes_sent(round_.between_hosts(workers_per_host), worker // workers_per_host, narrow)
            return 2 * (workers_per_host - 1) * share + between
        case _:
            return 0.0


def messages_sent(
    round_: Round, worker: int, transport: Transport | str | None = None, workers_per_host: int = 1
) -> int:
    """Return the messages that `worker` sends in this round; a ring all-reduce takes 2(g-1) of payload/g each.

    Raises ValueError when the round cannot be carried out by `transport`.
    """
    match _resolve(round_, transport, workers_per_host):
        case Transport.SEND_RECV:
            return len(round_.out_peers(worker))
        case Transport.SUBGROUP:
            return 2 * (len(_group_of(round_, worker)) - 1)
        case Transport.HIERARCHICAL:
            between = messages_sent(round_.between_hosts(workers_per_host), worker // workers_per_host)
            return 2 * (workers_per_host - 1) + between
        case _:
            return 0


def bytes_leaving_hosts(
    round_: Round, workers_per_host: int, payload_bytes: float, transport: Transport | str | None = None
) -> dict[int, float]:
    """Return {host: bytes that its workers send to other hosts in this round}, for the hosts that send any.

    Worker i lives on host i // workers_per_host. The ring of an all-reduce runs in the order of workers, and each
    of its directed edges carries 2(g-1)/g payloads. Raises ValueError when `transport` cannot carry out the round.
    """
    total: dict[int, float] = {}

    def add(source: int, target: int, amount: float) -> None:
        host = source // workers_per_host
        if host != target // workers_per_host:
            total[host] = total.get(host, 0.0) + amount

    match _resolve(round_, transport, workers_per_host):
        case Transport.SEND_RECV:
            for i in range(round_.world_size):
                for j in round_.out_peers(i):
                    add(i, j, payload_bytes)
        case Transport.SUBGROUP:
            for group in round_.groups:
                for i, j in zip(group, group[1:] + group[:1], strict=True):
                    add(i, j, 2 * (len(group) - 1) / len(group) * payload_bytes)
        case Transport.HIERARCHICAL:
            hosts = round_.between_hosts(workers_per_host)
            sent = {host: bytes_sent(hosts, host, payload_bytes) for host in range(hosts.world_size)}
            total = {host: amount for host, amount in sent.items() if amount}
    return total


def _between(round_: Round, workers_per_host: int) -> Round | None:
    """Return the round between hosts if hosts hold several workers and talk to each other, else None."""
    hosts = round_.between_hosts(workers_per_host) if workers_per_host > 1 else None
    return None if hosts is None or hosts.is_idle else hosts


def _resolve(round_: Round, transport: Transport | str | None, workers_per_host: int) -> Transport:
    if transport is None or round_.is_idle:
        return transport_of(round_, workers_per_host)
    chosen = Transport(transport)
    if chosen is Transport.IDLE:
        raise ValueError("transport='idle': expected send_recv, subgroup or hierarchical for a round that mixes")
    if chosen is Transport.SUBGROUP and round_.groups is None:
        raise ValueError(
            "transport='subgroup': expected a round of disjoint groups that average uniformly, "
            "got other weights; use send_recv"
        )
    if chosen is Transport.HIERARCHICAL and _between(round_, workers_per_host) is None:
        raise ValueError(
            f"transport='hierarchical': expected a round in which hosts of {workers_per_host} > 1 workers average "
            "inside before they talk to each other, got other weights; use send_recv"
        )
    return chosen


def _group_of(round_: Round, worker: int) -> tuple[int, ...]:
    # In a round of disjoint uniform groups a worker's row is its group.
    return tuple(round_.weights[worker])
