"""Exchanges without a hierarchy: messages along the edges of a sparse round, or an all-reduce in a group."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.optim.flat_state import Incoming
from common.parallel.collectives import sum_dtype
from common.parallel.gossip.exchange import Exchange, ReceiveBuffers, mix_
from common.parallel.gossip.messages import Message
from common.parallel.gossip.routes import Route
from common.parallel.streams import is_queued


class SendRecv(Exchange):
    """A bucket that this rank sends to some peers and receives from others.

    On the CPU, if several workers of a host send to other hosts, sending is a stage, so that it can wait for earlier
    rounds; see `RoundOrder` in `network.py`.

    message_dtype: dtype on the wire, None for the chunk's own; see `messages.py`
    error:         what earlier messages left out [numel of the chunk], if the dtype needs it
    """

    def __init__(
        self,
        chunk: Tensor,
        route: Route,
        buffers: ReceiveBuffers,
        message_dtype: torch.dtype | None = None,
        error: Tensor | None = None,
    ) -> None:
        super().__init__(chunk, route, buffers)
        self._narrow = None if message_dtype in (None, chunk.dtype) else Message(chunk, message_dtype, error)
        self._message = chunk if self._narrow is None else self._narrow.tensor
        if route.shares_link and not is_queued(chunk.device):
            self.stages, self.between_hosts = 2, range(2)
        self._received = {rank: self.take(self._message.numel(), self._message.dtype) for rank in route.receives}

    def receives(self) -> list[dist.P2POp]:
        """Return one receive for each rank it mixes with."""
        return [self.message(dist.irecv, tensor, rank) for rank, tensor in self._received.items()]

    def start(self) -> list[dist.P2POp]:
        """Return one send for each rank that takes from this one; none if sending is a stage."""
        return [] if self.stages else self._sends()

    def run(self, stage: int, timeout: timedelta) -> None:
        """Send in stage 0; wait in stage 1 until everything has arrived."""
        if stage == 0:
            self.post(self._sends())
        else:
            self._wait_for(timeout, *self._works)

    @property
    def message_bytes(self) -> int:
        """Bytes of the chunk as it travels."""
        return self._message.nbytes

    def incoming(self) -> Incoming | None:
        """Return the message if it is a single peer's and has the parameters' dtype."""
        if self._narrow is not None or len(self._received) != 1:
            return None
        ((rank, weight),) = self.route.receives.items()
        return Incoming(self._received[rank], self.weakened(self.route.own_weight), self.strength * weight)

    def merge(self) -> None:
        """Mix the messages in; see `mix_`."""
        weighted = [(self._received[rank], self.strength * weight) for rank, weight in self.route.receives.items()]
        if self._narrow is not None:
            self._narrow.merge_(self.chunk, weighted)
        else:
            mix_(self.chunk, self.weakened(self.route.own_weight), weighted)

    def _sends(self) -> list[dist.P2POp]:
        return [self.message(dist.isend, self._message, rank) for rank in self.route.sends]


class SubgroupAllReduce(Exchange):
    """A bucket that the members of one group average.

    The sum is taken in the chunk's dtype, in float32 for 16-bit chunks. No narrower `message_dtype` applies: rounding
    a sum would move the mean.
    """

    def __init__(self, chunk: Tensor, route: Route, buffers: ReceiveBuffers) -> None:
        super().__init__(chunk, route, buffers)
        self._sum = self.take(chunk.numel(), sum_dtype(chunk.dtype)).copy_(chunk)

    @property
    def message_bytes(self) -> int:
        """Bytes of the chunk in the dtype of the sum."""
        return self._sum.nbytes

    def start(self) -> list[dist.P2POp]:
        """Launch the all-reduce; `wait` reports a failure."""
        try:
            self.attach_works([dist.all_reduce(self._sum, group=self.route.allreduce, async_op=True)])
        except RuntimeError as error:
            self.attach_works([], error)
        return []

    def incoming(self) -> Incoming:
        """Return the sum, to be divided by the size of the group."""
        return Incoming(self._sum, self.weakened(0.0), self.strength / self.route.members)

    def merge(self) -> None:
        """Compute x_i <- sum / group size, in one pass at full strength."""
        if self.strength == 1:
            torch.mul(self._sum, 1 / self.route.members, out=self.chunk)
        else:
            self.chunk.mul_(self.weakened(0.0)).add_(self._sum, alpha=self.strength / self.route.members)
