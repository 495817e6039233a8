"""What one rank sends and receives for one bucket in one round.

`network.py` posts an exchange, `wait` blocks until its messages have arrived, `merge` mixes them into the bucket in one
pass, x_i <- sum_j W_ij x_j. Sends read the bucket in place.

Two facts shape the order of calls. gloo's send waits for the peer's "ready" message, which queues behind that peer's
payload on the same connection: so every receive of a step is posted before any send. NCCL wants the receives and sends
that depend on each other in one batch, in the same order on every rank.

Where the host runs ahead of the device (`common.parallel.streams`), "blocks" and "arrived" refer to the device's
current stream: the host queues the wait and goes on.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from common.optim.flat_state import Incoming
from common.parallel.gossip.messages import Message
from common.parallel.gossip.routes import Route
from common.parallel.streams import is_queued

KINDS = 4  # of messages within an exchange: plain ones, and the tags of `hierarchical.py`
_ROUNDS, _ATTEMPTS, _FRAGMENTS = 1 << 14, 1 << 8, 1 << 6


def tag_of(clock: int, attempt: int, fragment: int) -> int:
    """Return the tag that tells messages of a round from others; only gloo uses it, NCCL has no tags.

    attempt: how often rounds have been dropped to be launched again

    So a message can only arrive where its round is expected. The tag is a multiple of KINDS below 2^30; it repeats
    after 16384 rounds.
    """
    return ((clock % _ROUNDS * _ATTEMPTS + attempt % _ATTEMPTS) * _FRAGMENTS + fragment % _FRAGMENTS) * KINDS


class ReceiveBuffers:
    """Memory for received messages, kept from round to round.

    On the CPU fresh memory costs a page fault for every 4 KB, in every step. On CUDA the allocator could not reuse
    a block while the host runs ahead of the streams that read it. Here it is safe: a receive is queued behind the
    posting stream's earlier work, and that stream has read the block itself, or waited for the stream that did.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised vector [numel]."""
        free = self._free.get((numel, dtype))
        with torch.inference_mode(False):  # other threads write it
            return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, vector: Tensor) -> None:
        """Take back a vector that nothing queued from now on reads or writes."""
        self._free.setdefault((vector.numel(), vector.dtype), []).append(vector)


class Exchange(ABC):
    """One bucket of one round, from the point of view of one rank.

    chunk:   the bucket's slice of the flat vector, 1-D; read until `wait` returns, written by `merge`
    route:   how the round is carried out
    buffers: where it takes memory for messages, which it keeps until `release`
    stages:  number of steps after `start`, such as sends that wait for other messages: `network.py` calls `run` for
             one after another while the model computes
    between_hosts: which of the stages send to other hosts and wait for them; rounds take turns in these
    turn:    number of the round it belongs to
    tag:     the tag of its messages, see `tag_of`
    strength: g in [0, 1], how strongly it mixes: x_i <- (1 - g) x_i + g sum_j W_ij x_j
    """

    stages: int = 0
    between_hosts: range = range(0)
    turn: int = 0
    tag: int = 0
    strength: float = 1.0

    def __init__(self, chunk: Tensor, route: Route, buffers: ReceiveBuffers) -> None:
        self.chunk = chunk
        self.route = route
        self._buffers = buffers
        self._taken: list[Tensor] = []
        self._narrow: Message | None = None  # if the dtype of messages is not the chunk's
        self.staged = threading.Event()  # set when the last stage is over
        self.done: torch.cuda.Event | None = None  # what the device has passed when the last stage is over
        self._works: list[list[dist.Work]] = []
        self._failure: Exception | None = None

    def receives(self) -> list[dist.P2POp]:
        """Return the receives to be posted before any send of the step; none where collectives receive."""
        return []

    @abstractmethod
    def start(self) -> list[dist.P2POp]:
        """Return the sends to be posted after the receives; launch collectives."""

    def run(self, stage: int, timeout: timedelta) -> None:
        """Do stage number `stage`, waiting at most `timeout` for peers."""
        raise NotImplementedError(f"{type(self).__name__} has no stages")

    def incoming(self) -> Incoming | None:
        """Return the received tensor if merging is one weighted sum, so that a fused optimizer can fold it in."""
        return None

    @abstractmethod
    def merge(self) -> None:
        """Compute x_i <- sum_j W_ij x_j, with strength `strength`, in place. Call after `wait`."""

    def weakened(self, own_weight: float) -> float:
        """Return the own weight at this strength; other weights are multiplied by `strength`."""
        return own_weight if self.strength == 1 else 1 - self.strength * (1 - own_weight)

    def settle(self) -> None:
        """Remember what a narrow message left out; called once the round is merged for good."""
        if self._narrow is not None:
            self._narrow.settle()

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """Bytes of the whole bucket as it travels, inside hosts if it travels narrower between them."""

    @property
    def shard_bytes(self) -> int | None:
        """Bytes of a message between hosts, where it is narrower than its part of the bucket."""
        return None

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a vector [numel] on the chunk's device, held until `release`."""
        self._taken.append(self._buffers.take(numel, dtype, self.chunk.device))
        return self._taken[-1]

    def release(self) -> None:
        """Give the memory back; nothing may be in flight or still read the tensor of `incoming`."""
        for vector in self._taken:
            self._buffers.give_back(vector)
        self._taken.clear()

    def post(self, ops: Sequence[dist.P2POp]) -> None:
        """Hand messages to the network, and remember what `wait` has to wait for."""
        self.attach_works(*hand_over(ops))

    def message(self, op: Callable, tensor: Tensor, rank: int, kind: int = 0) -> dist.P2POp:
        """Return the send to, or the receive from, that rank; op: dist.isend or dist.irecv; kind: below KINDS."""
        return dist.P2POp(op, tensor, rank, group=self.route.messages, tag=self.tag + kind)

    def run_stage(self, index: int, timeout: timedelta) -> None:
        """Run a stage, unless one has failed; a failure is kept for `wait`."""
        if self._failure is None:
            try:
                self.run(index, timeout)
            except Exception as error:  # if it ended the thread, `wait` would never return
                self._failure = error

    def wait(self, timeout: timedelta) -> None:
        """Block until every message of this bucket has arrived and its sends are done.

        The host itself only blocks where it does not run ahead; elsewhere the process group's timeout ends the run.
        """
        if self.done is not None:
            torch.cuda.current_stream(self.chunk.device).wait_event(self.done)
        elif self.stages:
            self.staged.wait()  # each stage gives up on its own
        if self._failure is not None:
            raise self._failure
        self._wait_for(timeout, *self._works)
        self._works.clear()

    def settled(self, seconds: float) -> bool:
        """Wait briefly on the host, and return whether every message has arrived."""
        if self.stages and not self.staged.wait(max(0.0, seconds)):
            return False
        try:
            self.wait(timedelta(seconds=max(0.001, seconds)))
        except Exception:  # of any kind: the messages are not needed any more
            return False
        return True

    def watched(self) -> Callable[[], bool]:
        """Return a function that says, at any time and from any thread, whether the messages have arrived."""
        done, works = self.done, list(chain(*self._works))
        return lambda: (done is None or done.query()) and all(work.is_completed() for work in works)

    def _wait_for(self, timeout: timedelta, *posted: list[dist.Work]) -> None:
        """Wait for all of these works together, at most `timeout`; works that are done leave their list."""
        deadline = time.monotonic() + timeout.total_seconds()
        for works in posted:
            while works:
                if is_queued(self.chunk.device):
                    works[-1].wait()  # with a timeout NCCL would block the host until the messages arrived
                else:
                    works[-1].wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                works.pop()

    def attach_works(self, works: list[dist.Work], failure: RuntimeError | None = None) -> None:
        """Remember what `wait` has to wait for, and a failure, which it reports.

        works: they leave the list, which the exchanges of one batch share, once one of these has waited for them
        """
        self._works.append(works)
        self._failure = self._failure or failure


def hand_over(ops: Sequence[dist.P2POp]) -> tuple[list[dist.Work], RuntimeError | None]:
    """Post messages as one batch; return their works, or none and the failure: the peer is gone."""
    try:
        return (dist.batch_isend_irecv(list(ops)) if ops else []), None
    except RuntimeError as error:
        return [], error


def mix_(x: Tensor, own_weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    """Compute x <- own_weight x + sum of weight * tensor, in place: one pass for one peer, else one more than peers."""
    if len(received) == 1 and abs(own_weight + received[0][1] - 1) < 1e-12:
        x.lerp_(*received[0])
    elif own_weight != 1 or received:
        x.mul_(own_weight)
        for tensor, weight in received:
            x.add_(tensor, alpha=weight)
