"""How one bucket of a round travels: send/recv between peers, or an all-reduce inside a group.

An exchange is one bucket of one round: `network.py` posts it, `wait` blocks until it arrived, `merge` combines what
arrived with the bucket in one pass, x_i <- sum_j W_ij x_j. Sends read the bucket in place.

Two facts shape the order of calls. gloo's send waits for the peer's "ready" message, which queues behind that
peer's own payload on the same connection: so every receive of a step is posted before any send. NCCL wants the
receives and sends that depend on each other in one batch, in the same order on every rank.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.buffers import BufferPool
from common.parallel.collectives import sum_dtype
from common.parallel.messages import Message
from common.topology import Round, Transport


class Incoming(NamedTuple):
    """What arrived for a chunk x, where merging it is x <- own x + weight * tensor; tensor [numel of the chunk]."""

    tensor: Tensor
    own: float
    weight: float


class Exchange(ABC):
    """One bucket of one round, from the point of view of one rank.

    chunk:   this rank's part of the flat vector, 1-D; read until `wait` returns, written by `merge`
    peers:   the workers it exchanges messages with
    pool:    where it takes memory for what arrives, until `release`
    kind:    how it travels
    stages:  what follows once the first messages arrived: `network.py` runs them one after another, while the model
             computes. Each gets the time it may wait
    between_hosts: which of the stages send to other hosts and wait for them; rounds take turns in these
    turn:    number of the round that it belongs to
    """

    kind: Transport
    stages: Sequence[Callable[[timedelta], None]] = ()
    between_hosts: range = range(0)
    turn: int = 0

    def __init__(self, chunk: Tensor, peers: Sequence[int], pool: BufferPool) -> None:
        self.chunk = chunk
        self._pool = pool
        self._taken: list[Tensor] = []
        self.peers = tuple(peers)
        self.staged = threading.Event()  # set when the last stage is over
        self.stream: torch.cuda.Stream | None = None  # on which the stages were put
        self._works: list[dist.Work] = []
        self._failure: RuntimeError | None = None

    @abstractmethod
    def receives(self) -> list[dist.P2POp]:
        """Receives to be posted before any send of the step."""

    @abstractmethod
    def start(self) -> list[dist.P2POp]:
        """Sends to be posted after the receives; collectives are launched here."""

    def incoming(self) -> Incoming | None:
        """What arrived, for those who merge it in a pass of their own; None where it takes more than one tensor."""
        return None

    @abstractmethod
    def merge(self) -> None:
        """x_i <- sum_j W_ij x_j, in place. Call after `wait`."""

    def settle(self) -> None:
        """Called when the round is merged for good: remember what the next one of this bucket has to know."""
        return

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """Bytes of the whole bucket as it travels; where it travels narrower between hosts, inside of them."""

    @property
    def rail_bytes(self) -> int | None:
        """Bytes of a message between hosts, where it is narrower than its part of the bucket."""
        return None

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector [numel] on the chunk's device, this exchange's own until `release`."""
        self._taken.append(self._pool.take(numel, dtype, self.chunk.device))
        return self._taken[-1]

    def release(self) -> None:
        """Give the memory back; nothing may be in flight, and what `incoming` gave is no longer read."""
        for vector in self._taken:
            self._pool.give_back(vector)
        self._taken.clear()

    def post(self, ops: Sequence[dist.P2POp]) -> None:
        """Hand messages to the network. A failure (the peer is gone) is kept for `wait`, which reports all of them."""
        self.attach_works(self._hand_over(ops))

    def _hand_over(self, ops: Sequence[dist.P2POp]) -> list[dist.Work]:
        try:
            return dist.batch_isend_irecv(list(ops)) if ops else []
        except RuntimeError as error:
            self._failure = self._failure or error
            return []

    def run_stage(self, index: int, timeout: timedelta) -> None:
        """Run one of `stages`; none after a failure, which is kept for `wait`."""
        if self._failure is None:
            try:
                self.stages[index](timeout)
            except RuntimeError as error:
                self._failure = error
            except Exception as error:  # a thread that died of it would be waited for without end
                self._failure = RuntimeError(f"stage {index}: {error!r}")

    def wait(self, timeout: timedelta) -> None:
        """Block until every message of this bucket arrived and its sends are done.

        On CUDA only the stream waits and the host runs ahead: there the process group's own timeout ends the run.
        """
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        elif self.stages:
            self.staged.wait()  # each stage gives up by itself
        if self._failure is not None:
            raise self._failure
        self._wait_for(self._works, timeout)

    def _wait_for(self, works: list[dist.Work], timeout: timedelta) -> None:
        """Wait for all of them together so long at most; what is done leaves the list."""
        deadline = time.monotonic() + timeout.total_seconds()
        while works:
            if self.chunk.is_cuda:
                works[-1].wait()  # with a timeout NCCL would block the host until the messages arrived
            else:
                works[-1].wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            works.pop()

    def attach_works(self, works: Sequence[dist.Work]) -> None:
        """Remember what `wait` has to wait for."""
        self._works += [work for work in works if work is not None]


class SendRecv(Exchange):
    """Point-to-point messages along the edges of a sparse round.

    message_dtype: dtype on the wire, None for the chunk's own; see `messages.py`
    error:         what earlier messages left out [numel of the chunk], where the dtype wants it
    """

    kind = Transport.SEND_RECV

    def __init__(
        self,
        chunk: Tensor,
        round_: Round,
        worker: int,
        to_rank: Callable[[int], int],
        group: dist.ProcessGroup | None,
        pool: BufferPool,
        message_dtype: torch.dtype | None = None,
        error: Tensor | None = None,
    ) -> None:
        self._in = round_.in_peers(worker)
        self._out = round_.out_peers(worker)
        super().__init__(chunk, sorted({*self._in, *self._out}), pool)
        self._self_weight = round_.self_weight(worker)
        self._to_rank, self._group = to_rank, group
        self._narrow = None if message_dtype in (None, chunk.dtype) else Message(chunk, message_dtype, error)
        self._message = chunk if self._narrow is None else self._narrow.tensor
        self._received = {peer: self.take(self._message.numel(), self._message.dtype) for peer in self._in}

    def receives(self) -> list[dist.P2POp]:
        """One receive for each in-peer."""
        return [self._op(dist.irecv, tensor, peer) for peer, tensor in self._received.items()]

    def start(self) -> list[dist.P2POp]:
        """One send for each out-peer."""
        return [self._op(dist.isend, self._message, peer) for peer in self._out]

    @property
    def message_bytes(self) -> int:
        """Bytes of the chunk as it travels."""
        return self._message.nbytes

    def _op(self, kind: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._to_rank(peer), group=self._group)

    def incoming(self) -> Incoming | None:
        """Of a single peer, in the parameters' dtype."""
        if self._narrow is not None or len(self._in) != 1:
            return None
        ((peer, weight),) = self._in.items()
        return Incoming(self._received[peer], self._self_weight, weight)

    def merge(self) -> None:
        """One lerp for one peer; one pass more for each further peer."""
        chunk = self.chunk
        if self._narrow is not None:
            self._narrow.merge_(chunk, [(self._received[peer], w) for peer, w in self._in.items()])
        elif len(self._in) == 1 and abs(self._self_weight + sum(self._in.values()) - 1) < 1e-12:
            ((peer, weight),) = self._in.items()
            chunk.lerp_(self._received[peer], weight)
        else:
            chunk.mul_(self._self_weight)
            for peer, weight in self._in.items():
                chunk.add_(self._received[peer], alpha=weight)

    def settle(self) -> None:
        """Remember what this message left out."""
        if self._narrow is not None:
            self._narrow.settle()


class Subgroup(Exchange):
    """An all-reduce among the members of one group, all with weight 1 / group size.

    The sum is taken in the chunk's dtype, in float32 for 16-bit chunks. No narrower `message_dtype` applies: the
    rounding of a sum would move the mean.
    """

    kind = Transport.SUBGROUP

    def __init__(
        self,
        chunk: Tensor,
        members: Sequence[int],
        worker: int,
        group: dist.ProcessGroup,
        pool: BufferPool,
    ) -> None:
        super().__init__(chunk, [member for member in members if member != worker], pool)
        self._size, self._group = len(members), group
        self._sum = self.take(chunk.numel(), sum_dtype(chunk.dtype)).copy_(chunk)

    @property
    def message_bytes(self) -> int:
        """Bytes of the chunk in the dtype of the sum."""
        return self._sum.nbytes

    def receives(self) -> list[dist.P2POp]:
        """None: a collective receives by itself."""
        return []

    def start(self) -> list[dist.P2POp]:
        """Launch the all-reduce."""
        self.attach_works([dist.all_reduce(self._sum, group=self._group, async_op=True)])
        return []

    def incoming(self) -> Incoming:
        """The sum."""
        return Incoming(self._sum, 0.0, 1 / self._size)

    def merge(self) -> None:
        """x_i <- sum / group size, in one pass."""
        torch.mul(self._sum, 1 / self._size, out=self.chunk)
