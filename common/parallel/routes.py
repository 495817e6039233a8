"""How the rounds of a training travel: chooses the transport of each and makes its exchanges."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from common.parallel.buffers import BufferPool
from common.parallel.communicators import Communicators
from common.parallel.hierarchical import Hierarchical
from common.parallel.transport import Exchange, SendRecv, Subgroup
from common.topology import Round, Topology, Transport, transport_of


class Routes:
    """Makes exchanges for rounds of these topologies (one for each phase, all over the same hosts).

    transport:     "auto", or force "send_recv" or "subgroup" wherever the round allows it
    message_dtype: dtype of messages between peers, None for the parameters' own; all-reduces, and averages inside hosts
                   that talk to others, keep their precision

    Collective: opens the process groups that the rounds need. Warns where no message can have the dtype.
    """

    def __init__(
        self,
        topologies: Sequence[Topology],
        communicators: Communicators,
        transport: str,
        message_dtype: torch.dtype | None,
    ) -> None:
        self.workers_per_host = topologies[0].workers_per_host
        self._communicators = communicators
        self._transport = transport
        self._message_dtype = message_dtype
        self._pool = BufferPool()
        # Random schedules get no groups: theirs are not known beforehand, they use send/recv.
        rounds = [topology.round(t) for topology in topologies for t in range(topology.period or 0)]
        kinds = {kind for round_ in rounds if (kind := self._narrowable(round_)) is not Transport.IDLE}
        if message_dtype is not None and kinds == {Transport.SUBGROUP} and communicators.rank == 0:
            warnings.warn(
                f"message_dtype={message_dtype}: all rounds of topology {topologies[0].name} travel by all-reduce, "
                "which keeps the precision of parameters: it has no effect",
                stacklevel=2,
            )
        communicators.open_groups("subgroup", {members for round_ in rounds for members in self._subgroups(round_)})
        communicators.open_groups("rail", {members for round_ in rounds for members in self._rails(round_)})

    def kind(self, round_: Round) -> Transport:
        """The transport of a round."""
        kind = transport_of(round_, self.workers_per_host)
        if kind is Transport.IDLE or self._transport == "auto":
            return kind
        if self._transport == "subgroup" and round_.groups is not None:
            return Transport.SUBGROUP
        return Transport.SEND_RECV

    def exchange(self, round_: Round, chunk: Tensor, error: Tensor | None = None) -> Exchange | None:
        """The exchange of a bucket `chunk` in this round; None where this worker has nobody to talk to.

        error: what the bucket's earlier messages left out [numel of the chunk], where message_dtype wants it
        """
        communicators = self._communicators
        worker, to_rank, group = communicators.worker, communicators.to_rank, communicators.rail
        kind = self.kind(round_)
        if kind is Transport.HIERARCHICAL:
            hosts, size = round_.between_hosts(self.workers_per_host), self.workers_per_host
            members = self._rail_of(hosts, worker // size)
            rail = communicators.group("rail", members) if members else None
            return Hierarchical(
                chunk,
                hosts,
                worker,
                size,
                to_rank,
                group,
                rail,
                self._pool,
                ahead=not chunk.is_cuda,
                message_dtype=self._message_dtype,
                error=error,
            )
        if kind is Transport.SUBGROUP:
            members = next(members for members in round_.groups or () if worker in members)
            subgroup = communicators.group("subgroup", members)
            if len(members) == 1:
                return None
            if subgroup is not None:
                return Subgroup(chunk, members, worker, subgroup, self._pool)
        if kind is Transport.IDLE:
            return None
        return SendRecv(chunk, round_, worker, to_rank, group, self._pool, self._message_dtype, error)

    def _narrowable(self, round_: Round) -> Transport:
        """How what `message_dtype` applies to travels: between hosts, where these average inside."""
        kind = self.kind(round_)
        return transport_of(round_.between_hosts(self.workers_per_host)) if kind is Transport.HIERARCHICAL else kind

    def _subgroups(self, round_: Round) -> list[tuple[int, ...]]:
        """Workers that average by all-reduce."""
        if self.kind(round_) is not Transport.SUBGROUP:
            return []
        return [members for members in round_.groups or () if len(members) > 1]

    def _rails(self, round_: Round) -> list[tuple[int, ...]]:
        """Workers at the same place of hosts that average by all-reduce."""
        if self.kind(round_) is not Transport.HIERARCHICAL:
            return []
        hosts = round_.between_hosts(self.workers_per_host)
        if transport_of(hosts) is not Transport.SUBGROUP:
            return []
        size = self.workers_per_host
        return [
            tuple(host * size + place for host in members)
            for members in hosts.groups or ()
            for place in range(size)
            if len(members) > 1
        ]

    def _rail_of(self, hosts: Round, host: int) -> tuple[int, ...]:
        """The rail of this worker where hosts average by all-reduce, else ()."""
        if transport_of(hosts) is not Transport.SUBGROUP:
            return ()
        size, place = self.workers_per_host, self._communicators.worker % self.workers_per_host
        members = next(members for members in hosts.groups or () if host in members)
        return tuple(other * size + place for other in members) if len(members) > 1 else ()
