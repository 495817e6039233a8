"""How this rank carries out the rounds of a training run: each is resolved once, for all buckets and steps."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist

from common.parallel.process_groups import ProcessGroups
from common.topology import Round, Topology, Transport, bytes_sent, messages_sent, transport_of


@dataclass(frozen=True)
class Route:
    """How this rank carries out one round.

    kind:       transport of the round: SEND_RECV, SUBGROUP or HIERARCHICAL
    own_weight: weight of this worker's values in the point-to-point part of the round
    receives:   {rank: weight} of the messages it mixes
    sends:      ranks that take its messages
    messages:   the process group in which messages travel
    members:    number of workers that average by all-reduce
    allreduce:  their process group; None where there is no all-reduce
    index:      HIERARCHICAL: this worker's index in its host
    local:      HIERARCHICAL: {index: rank} of the other workers of its host
    host:       HIERARCHICAL: process group of the workers of its host, if there are collectives inside hosts

    With HIERARCHICAL, weights, receives, sends and all-reduce are those between hosts, along this worker's rail.
    """

    kind: Transport
    round: Round
    worker: int
    workers_per_host: int
    own_weight: float = 0.0
    receives: Mapping[int, float] = field(default_factory=dict)
    sends: tuple[int, ...] = ()
    messages: dist.ProcessGroup | None = None
    members: int = 1
    allreduce: dist.ProcessGroup | None = None
    index: int = 0
    local: Mapping[int, int] = field(default_factory=dict)
    host: dist.ProcessGroup | None = None

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks with which messages are exchanged."""
        return tuple(sorted({*self.receives, *self.sends, *self.local.values()}))

    @cached_property
    def shares_link(self) -> bool:
        """Whether this worker sends to other hosts over a link that other workers of its host use too."""
        host, size = self.worker // self.workers_per_host, self.workers_per_host
        return size > 1 and any(peer // size != host for peer in self.round.out_peers(self.worker))

    def bytes_sent(self, message_bytes: float, shard_bytes: float | None = None) -> float:
        """Return the bytes this rank sends for a bucket; arguments as of `common.topology.bytes_sent`."""
        return bytes_sent(self.round, self.worker, message_bytes, self.kind, self.workers_per_host, shard_bytes)

    def messages_sent(self) -> int:
        """Return the messages this rank sends for a bucket."""
        return messages_sent(self.round, self.worker, self.kind, self.workers_per_host)


class Routes:
    """Resolves the rounds of these topologies (one for each phase, all over the same hosts).

    transport:     "auto", or force "send_recv" or "subgroup" wherever the round allows it
    message_dtype: dtype of messages between peers, None for the parameters' own; all-reduces, and averages inside hosts
                   that talk to others, keep their precision
    collectives_inside: whether hosts that talk to others average inside by collectives, not by messages

    Collective: opens the process groups that the rounds need. Warns if no message can have the dtype.
    """

    def __init__(
        self,
        topologies: Sequence[Topology],
        groups: ProcessGroups,
        transport: str,
        message_dtype: torch.dtype | None,
        collectives_inside: bool = False,
    ) -> None:
        self._workers_per_host = topologies[0].workers_per_host
        self._groups = groups
        self._transport = transport
        self._resolved: dict[tuple[str, int], Route | None] = {}
        # Random schedules get no groups, since theirs are not known in advance; they use send/recv.
        rounds = [topology.round(t) for topology in topologies for t in range(topology.period or 0)]
        kinds = {self._kind_between(round_) for round_ in rounds} - {Transport.IDLE}
        if message_dtype is not None and kinds == {Transport.SUBGROUP} and groups.rank == 0:
            warnings.warn(
                f"message_dtype={message_dtype}: all rounds of topology {topologies[0].name} travel by all-reduce, "
                "which keeps the precision of parameters: it has no effect",
                stacklevel=2,
            )
        subgroups = [several(round_) for round_ in rounds if self._kind(round_) is Transport.SUBGROUP]
        rails = [self._rails(round_) for round_ in rounds if self._kind(round_) is Transport.HIERARCHICAL]
        groups.open_groups("subgroup", set(chain(*subgroups)))
        groups.open_groups("rail", set(chain(*rails)))
        size = self._workers_per_host
        if collectives_inside and size > 1 and (rails or any(topology.period is None for topology in topologies)):
            groups.open_groups("host", [tuple(range(first, first + size)) for first in range(0, groups.workers, size)])

    def at(self, topology: Topology, clock: int) -> Route | None:
        """Return the route of round `clock`; None if this worker has no peer in it."""
        key = (topology.name, clock % (topology.period or clock + 1))
        if key not in self._resolved:
            if topology.period is None:  # rounds do not repeat
                self._resolved.clear()
            self._resolved[key] = self._resolve(topology.round(clock))
        return self._resolved[key]

    def _resolve(self, round_: Round) -> Route | None:
        worker, size = self._groups.worker, self._workers_per_host
        match self._kind(round_):
            case Transport.IDLE:
                return None
            case Transport.HIERARCHICAL:
                host, index = divmod(worker, size)
                hosts = round_.between_hosts(size)
                rail = next((members for members in self._rails(round_) if worker in members), ())
                local = {i: self._groups.to_rank(host * size + i) for i in range(size) if i != index}
                inside = tuple(range(host * size, (host + 1) * size))
                return self._route(
                    Transport.HIERARCHICAL,
                    round_,
                    {h * size + index: weight for h, weight in hosts.in_peers(host).items()},
                    [h * size + index for h in hosts.out_peers(host)],
                    own_weight=hosts.self_weight(host),
                    members=len(rail),
                    allreduce=self._groups.group("rail", rail) if rail else None,
                    index=index,
                    local=local,
                    host=self._groups.group("host", inside),
                )
            case Transport.SUBGROUP:
                members = tuple(round_.weights[worker])  # in a round of uniform groups a worker's row is its group
                if len(members) == 1:
                    return None
                group = self._groups.group("subgroup", members)
                if group is not None:
                    others = [member for member in members if member != worker]
                    return self._route(Transport.SUBGROUP, round_, {}, others, members=len(members), allreduce=group)
        receives, sends = round_.in_peers(worker), round_.out_peers(worker)
        return self._route(Transport.SEND_RECV, round_, receives, sends, own_weight=round_.self_weight(worker))

    def _route(
        self, kind: Transport, round_: Round, receives: Mapping[int, float], sends: Sequence[int], **others: object
    ) -> Route:
        """Return a route; `receives` and `sends` name workers."""
        groups = self._groups
        return Route(
            kind,
            round_,
            groups.worker,
            self._workers_per_host,
            receives={groups.to_rank(worker): weight for worker, weight in receives.items()},
            sends=tuple(map(groups.to_rank, sends)),
            messages=groups.between_workers,
            **others,
        )

    def _kind(self, round_: Round) -> Transport:
        """Return the transport of a round."""
        kind = transport_of(round_, self._workers_per_host)
        if kind is Transport.IDLE or self._transport == "auto":
            return kind
        if self._transport == "subgroup" and round_.groups is not None:
            return Transport.SUBGROUP
        return Transport.SEND_RECV

    def _kind_between(self, round_: Round) -> Transport:
        """Return the transport of the messages that `message_dtype` narrows: those between hosts if there are any."""
        kind, size = self._kind(round_), self._workers_per_host
        return transport_of(round_.between_hosts(size)) if kind is Transport.HIERARCHICAL else kind

    def _rails(self, round_: Round) -> list[tuple[int, ...]]:
        """Return the workers of each rail that average by all-reduce in a hierarchical round."""
        size = self._workers_per_host
        hosts = round_.between_hosts(size)
        if transport_of(hosts) is not Transport.SUBGROUP:
            return []
        return [tuple(host * size + index for host in members) for members in several(hosts) for index in range(size)]


def several(round_: Round) -> list[tuple[int, ...]]:
    """Return the groups of two or more workers that average uniformly."""
    return [members for members in round_.groups or () if len(members) > 1]
