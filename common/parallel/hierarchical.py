"""A round in which every host averages inside before hosts talk: W = M (x) J/L for H hosts of L ranks each.

The bucket is cut into L pieces; rank l of a host owns piece l.

    scatter   every rank sends piece l to rank l of its host, which averages what it gets
    rails     rank l exchanges its averaged piece with rank l of the hosts that M names, and combines: M (x) piece
    gather    every rank sends its piece to the others of its host

So one payload leaves a host for each host that takes from it, where every rank would send its own. Receives go ahead of
the sends they depend on; pieces travel in the dtype of the sum.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.buffers import BufferPool
from common.parallel.collectives import sum_dtype
from common.parallel.messages import Message, message_layout
from common.parallel.transport import Exchange, Incoming
from common.topology import Round, Transport


class Tag(IntEnum):
    """Messages of one kind arrive in the order in which they were sent; of different kinds in any order."""

    SCATTER = 1
    RAIL = 2
    GATHER = 3


class Hierarchical(Exchange):
    """One bucket of such a round.

    hosts:          M
    worker:         this rank's number among all workers, on host worker // workers_per_host
    to_rank, group: rank of a worker, and the group in which point-to-point messages travel
    rail:           the group of the workers that M averages uniformly, if an all-reduce pays there
    message_dtype:  of messages between hosts, None for the dtype of the sum; an all-reduce keeps that
    error:          what earlier messages left out [numel of the chunk], where the dtype wants it
    ahead:          whether receives are messages of their own, posted before the sends (gloo, so on the CPU)
    """

    kind = Transport.HIERARCHICAL

    def __init__(
        self,
        chunk: Tensor,
        hosts: Round,
        worker: int,
        workers_per_host: int,
        to_rank: Callable[[int], int],
        group: dist.ProcessGroup | None,
        rail: dist.ProcessGroup | None,
        pool: BufferPool,
        *,
        ahead: bool,
        message_dtype: torch.dtype | None = None,
        error: Tensor | None = None,
    ) -> None:
        host, self._place = divmod(worker, workers_per_host)
        first = host * workers_per_host
        self._local = {place: first + place for place in range(workers_per_host) if place != self._place}
        self._in = {h * workers_per_host + self._place: weight for h, weight in hosts.in_peers(host).items()}
        self._out = [h * workers_per_host + self._place for h in hosts.out_peers(host)]
        super().__init__(chunk, sorted({*self._local.values(), *self._in, *self._out}), pool)
        self._own_weight = hosts.self_weight(host)
        self._to_rank, self._group, self._rail, self._ahead = to_rank, group, rail, ahead
        self._source = chunk.to(sum_dtype(chunk.dtype))
        self._numel = chunk.numel()
        self._size = -(-self._numel // workers_per_host)
        # What arrives from the others of the host lies where their averaged pieces will come to lie.
        self._result = self.take(self._size * workers_per_host, self._source.dtype)
        self._mean = self._piece(self._result, self._place)
        narrow = message_dtype not in (None, self._source.dtype) and rail is None
        self._message_dtype = message_dtype if narrow else None
        self._error = None if error is None else self._piece(error, self._place)
        self._narrow: Message | None = None
        self._from_rails: dict[int, Tensor] = {}
        self._scattered: list[dist.Work] = []
        self._railed: list[dist.Work] = []
        self.stages = (self._sum, self._send_between_hosts, self._combine_and_gather)
        if rail is None and (self._in or self._out):
            self.between_hosts = range(1, 3)  # an all-reduce of all hosts leaves no link to others

    @property
    def message_bytes(self) -> int:
        """Bytes of the whole bucket in the dtype of the sum."""
        return self._source.nbytes

    @property
    def rail_bytes(self) -> int | None:
        """Of this rank's piece in the narrow dtype."""
        if self._message_dtype is None:
            return None
        numel, dtype = message_layout(self._mean.numel(), self._message_dtype)
        return numel * dtype.itemsize

    def receives(self) -> list[dist.P2POp]:
        """The others' parts of this rank's piece."""
        return sized([self._op(dist.irecv, self._landing(p), worker, Tag.SCATTER) for p, worker in self._local.items()])

    def start(self) -> list[dist.P2POp]:
        """This rank's parts of the others' pieces."""
        pieces = {worker: self._piece(self._source, place) for place, worker in self._local.items()}
        return sized([self._op(dist.isend, piece, worker, Tag.SCATTER) for worker, piece in pieces.items()])

    def post(self, ops: Sequence[dist.P2POp]) -> None:
        """As every exchange does; what a stage waits for is kept for it."""
        works = self._hand_over(ops)
        if any(op.tag == Tag.SCATTER and op.op is dist.irecv for op in ops):
            self._scattered += works
        elif any(op.tag == Tag.RAIL for op in ops):
            self._railed += works
        else:
            self.attach_works(works)

    def incoming(self) -> Incoming:
        """The averaged bucket."""
        return Incoming(self._result[: self._numel], 0.0, 1.0)

    def merge(self) -> None:
        """x_i <- the averaged bucket."""
        self.chunk.copy_(self._result[: self._numel])

    def settle(self) -> None:
        """Remember what this rank's message between hosts left out."""
        if self._narrow is not None:
            self._narrow.settle()

    # -- stages

    def _sum(self, timeout: timedelta) -> None:
        self._wait_for(self._scattered, timeout)
        mean = self._mean
        own, (first, *rest) = self._piece(self._source, self._place), map(self._landing, self._local)
        if rest:
            torch.add(own, first, out=mean)
            for piece in rest:
                mean.add_(piece)
            mean.div_(len(self._local) + 1)
        else:  # two ranks a host: one pass over memory
            torch.lerp(own, first, 0.5, out=mean)
        if self._ahead:
            self._post_each(self._gather_receives())

    def _send_between_hosts(self, timeout: timedelta) -> None:
        mean = self._mean
        if self._rail is not None:
            self._railed.append(dist.all_reduce(mean, group=self._rail, async_op=True))
        else:
            message = mean
            if self._message_dtype is not None:
                self._narrow = Message(mean, self._message_dtype, self._error)
                message = self._narrow.tensor
            sends = [self._op(dist.isend, message, worker, Tag.RAIL) for worker in self._out]
            self._post_each(self._rail_receives() + sends)

    def _combine_and_gather(self, timeout: timedelta) -> None:
        self._wait_for(self._railed, timeout)  # sends too: what they read is written next
        mean = self._mean
        weighted = [(received, self._in[worker]) for worker, received in self._from_rails.items()]
        if self._narrow is not None:
            self._narrow.merge_(mean, weighted)
        elif len(weighted) == 1 and abs(self._own_weight + weighted[0][1] - 1) < 1e-12:
            mean.lerp_(*weighted[0])  # one pass over memory
        elif self._own_weight != 1 or weighted:
            mean.mul_(self._own_weight)
            for received, weight in weighted:
                mean.add_(received, alpha=weight)
        receives = [] if self._ahead else self._gather_receives()
        self._post_each(receives + [self._op(dist.isend, mean, worker, Tag.GATHER) for worker in self._local.values()])

    # -- messages

    def _piece(self, vector: Tensor, place: int) -> Tensor:
        return vector[min(place * self._size, self._numel) : min((place + 1) * self._size, self._numel)]

    def _landing(self, place: int) -> Tensor:
        return self._result[place * self._size : (place + 1) * self._size][: self._mean.numel()]

    def _rail_receives(self) -> list[dist.P2POp]:
        numel, dtype = message_layout(self._mean.numel(), self._message_dtype or self._mean.dtype)
        self._from_rails = {worker: self.take(numel, dtype) for worker in self._in}
        return [self._op(dist.irecv, tensor, worker, Tag.RAIL) for worker, tensor in self._from_rails.items()]

    def _gather_receives(self) -> list[dist.P2POp]:
        pieces = {worker: self._piece(self._result, place) for place, worker in self._local.items()}
        return [self._op(dist.irecv, piece, worker, Tag.GATHER) for worker, piece in pieces.items()]

    def _op(self, kind: Callable, tensor: Tensor, worker: int, tag: Tag) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._to_rank(worker), group=self._group, tag=int(tag))

    def _post_each(self, ops: list[dist.P2POp]) -> None:
        for batch in [[op] for op in sized(ops)] if self._ahead else [sized(ops)]:
            self.post(batch)


def sized(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    """Those with something in them: the last pieces of a small bucket may be empty."""
    return [op for op in ops if op.tensor.numel()]
