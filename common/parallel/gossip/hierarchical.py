"""A round in which every host averages inside before hosts talk: W = M (x) J/L for H hosts of L workers each.

The bucket is cut into L shards; the worker with index l in its host owns shard l.

    scatter   every worker sends shard l to worker l of its host, which averages the shards it gets
    rails     worker l exchanges its averaged shard with worker l of the hosts that M names, and combines: M (x) shard
    gather    every worker sends its shard to the others of its host

So one payload leaves a host for each host that takes from it, instead of one from every worker. Shards travel in the
dtype of the sum, or narrower between hosts. Inside a host they travel as gloo messages, whose receives are posted
before the sends that they depend on, or by NCCL's collectives.
"""

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.optim.flat_state import Incoming
from common.parallel.collectives import sum_dtype
from common.parallel.gossip.exchange import KINDS, Exchange, ReceiveBuffers, hand_over, mix_
from common.parallel.gossip.messages import Message
from common.parallel.gossip.routes import Route
from common.torch_internals import all_gather_single, reduce_scatter_single


class Tag(IntEnum):
    """Messages of one kind arrive in the order in which they were sent, messages of different kinds in any order."""

    SCATTER = 1
    RAIL = 2
    GATHER = 3


class Hierarchical(Exchange):
    """One bucket of a hierarchical round.

    message_dtype: dtype of messages between hosts, None for the sum's; an all-reduce always has the sum's
    error:         what earlier messages left out [numel of the chunk], if the dtype needs it
    """

    stages = 3

    def __init__(
        self,
        chunk: Tensor,
        route: Route,
        buffers: ReceiveBuffers,
        message_dtype: torch.dtype | None = None,
        error: Tensor | None = None,
    ) -> None:
        super().__init__(chunk, route, buffers)
        self._sum_dtype = sum_dtype(chunk.dtype)
        self._numel = chunk.numel()
        self._workers = len(route.local) + 1
        self._size = -(-self._numel // self._workers)  # of a shard; the last ones may be shorter
        # Receive buffer of messages from others in the host: the places of their averaged shards.
        self._result = self.take(self._size * self._workers, self._sum_dtype)
        self._mean = self._shard(self._result, route.index)
        narrow = message_dtype not in (None, self._sum_dtype) and route.allreduce is None
        self._message_dtype = message_dtype if narrow else None
        self._error = None if error is None else self._shard(error, route.index)
        self._from_rail: dict[int, Tensor] = {}
        self._railed: list[dist.Work] = []
        if route.allreduce is None and (route.receives or route.sends):
            self.between_hosts = range(1, 3)  # an all-reduce of all hosts leaves no link to others

    @property
    def message_bytes(self) -> int:
        """Bytes of the whole bucket in the dtype of the sum."""
        return self._numel * self._sum_dtype.itemsize

    @property
    def shard_bytes(self) -> int | None:
        """Bytes of this worker's shard in the narrow dtype, once it was sent."""
        return None if self._narrow is None else self._narrow.tensor.nbytes

    def run(self, stage: int, timeout: timedelta) -> None:
        """Average inside the host, send between hosts, or combine and gather."""
        (self._average_inside, self._send_between_hosts, self._combine_and_gather)[stage](timeout)

    def incoming(self) -> Incoming:
        """Return the averaged bucket."""
        return Incoming(self._result[: self._numel], self.weakened(0.0), self.strength)

    def merge(self) -> None:
        """Compute x_i <- the averaged bucket."""
        if self.strength == 1:
            self.chunk.copy_(self._result[: self._numel])
        else:
            self.chunk.mul_(self.weakened(0.0)).add_(self._result[: self._numel], alpha=self.strength)

    @abstractmethod
    def _average_inside(self, timeout: timedelta) -> None:
        """Turn `_mean` into the mean of this worker's shard over the host."""

    def _send_between_hosts(self, timeout: timedelta) -> None:
        if self.route.allreduce is not None:
            self._railed.append(dist.all_reduce(self._mean, group=self.route.allreduce, async_op=True))
            return
        message = self._mean
        if self._message_dtype is not None:
            self._narrow = Message(message, self._message_dtype, self._error)
            message = self._narrow.tensor
        self._from_rail = {rank: self.take(message.numel(), message.dtype) for rank in self.route.receives}
        receives = [self.message(dist.irecv, tensor, rank, Tag.RAIL) for rank, tensor in self._from_rail.items()]
        sends = [self.message(dist.isend, message, rank, Tag.RAIL) for rank in self.route.sends]
        self._post_messages(receives + sends)

    @abstractmethod
    def _post_messages(self, ops: list[dist.P2POp]) -> None:
        """Post the messages that are not empty; add the works of those between hosts to `_railed`."""

    def _combine_and_gather(self, timeout: timedelta) -> None:
        self._wait_for(timeout, self._railed)  # sends too: what they read is written next
        weighted = [(received, self.route.receives[rank]) for rank, received in self._from_rail.items()]
        if self._narrow is not None:
            self._narrow.merge_(self._mean, weighted)
        else:  # after an all-reduce what is left is the division by the number of hosts
            mix_(self._mean, self.route.own_weight, weighted)
        self._gather(timeout)

    @abstractmethod
    def _gather(self, timeout: timedelta) -> None:
        """Give every worker of the host all shards."""

    def _shard(self, vector: Tensor, index: int) -> Tensor:
        return vector[min(index * self._size, self._numel) : min((index + 1) * self._size, self._numel)]


class HierarchicalByMessages(Hierarchical):
    """A bucket on the CPU: each receive has its own message, posted before the sends that depend on it."""

    def __init__(self, chunk: Tensor, *arguments: Any) -> None:
        super().__init__(chunk, *arguments)
        self._source = chunk.to(self._sum_dtype)
        self._scattered: list[dist.Work] = []

    def receives(self) -> list[dist.P2POp]:
        """Return the receives of the other workers' values for this worker's shard."""
        local = self.route.local.items()
        return not_empty([self.message(dist.irecv, self._landing(i), rank, Tag.SCATTER) for i, rank in local])

    def start(self) -> list[dist.P2POp]:
        """Return the sends of this worker's values for the other workers' shards."""
        shards = {rank: self._shard(self._source, index) for index, rank in self.route.local.items()}
        return not_empty([self.message(dist.isend, shard, rank, Tag.SCATTER) for rank, shard in shards.items()])

    def post(self, ops: Sequence[dist.P2POp]) -> None:
        """Hand messages to the network, as every exchange does; works that a stage waits for are kept for it."""
        works, failure = hand_over(ops)
        if any(op.tag % KINDS == Tag.SCATTER and op.op is dist.irecv for op in ops):
            self._scattered += works
            works = []
        elif any(op.tag % KINDS == Tag.RAIL for op in ops):
            self._railed += works
            works = []
        self.attach_works(works, failure)

    def _average_inside(self, timeout: timedelta) -> None:
        self._wait_for(timeout, self._scattered)
        mean = self._mean
        own, (first, *rest) = self._shard(self._source, self.route.index), map(self._landing, self.route.local)
        if rest:
            torch.add(own, first, out=mean)
            for shard in rest:
                mean.add_(shard)
            mean.div_(self._workers)
        else:  # two workers per host: one pass over memory
            torch.lerp(own, first, 0.5, out=mean)
        shards = {rank: self._shard(self._result, index) for index, rank in self.route.local.items()}
        self._post_messages([self.message(dist.irecv, shard, rank, Tag.GATHER) for rank, shard in shards.items()])

    def _gather(self, timeout: timedelta) -> None:
        ranks = self.route.local.values()
        self._post_messages([self.message(dist.isend, self._mean, rank, Tag.GATHER) for rank in ranks])

    def _landing(self, index: int) -> Tensor:
        return self._result[index * self._size : (index + 1) * self._size][: self._mean.numel()]

    def _post_messages(self, ops: list[dist.P2POp]) -> None:
        for op in not_empty(ops):
            self.post([op])


class HierarchicalByCollectives(Hierarchical):
    """A bucket on a GPU: in-place reduce-scatter and all-gather in the host, with a batch of messages in between."""

    def start(self) -> list[dist.P2POp]:
        """Copy the bucket to where its sum will go, padded so that its shards are equally long."""
        self._result[: self._numel].copy_(self.chunk)
        self._result[self._numel :].zero_()
        return []

    def _average_inside(self, timeout: timedelta) -> None:
        work = reduce_scatter_single(self._own, self._result, group=self.route.host, async_op=True)
        self._wait_for(timeout, [work])
        self._own.div_(self._workers)

    def _post_messages(self, ops: list[dist.P2POp]) -> None:
        works, failure = hand_over(not_empty(ops))
        self._railed += works
        self.attach_works([], failure)

    def _gather(self, timeout: timedelta) -> None:
        work = all_gather_single(self._result, self._own, group=self.route.host, async_op=True)
        self._wait_for(timeout, [work])

    @property
    def _own(self) -> Tensor:
        """This worker's shard with its padding."""
        return self._result[self.route.index * self._size : (self.route.index + 1) * self._size]


def not_empty(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    """Return the messages that carry elements: the last shards of a small bucket may be empty."""
    return [op for op in ops if op.tensor.numel()]
