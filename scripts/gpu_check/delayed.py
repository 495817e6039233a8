"""A process group whose other ranks are echoes of this one: every message arrives late, with this rank's own content.

So one process on one GPU runs the engine as one of many ranks. As all workers are equal, mixing must change nothing: a
training with messages has to end as one without, unless messages are read before they have arrived, or parameters are
written while they are still being sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "delayed"
DELAY_CYCLES = 2_000_000  # of the GPU, about a millisecond


class DelayedWork(dist.Work):
    """Something that happens to tensors later: on a GPU on the stream of messages, on a CPU when it is waited for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._stream = stream
        self._event: torch.cuda.Event | None = None
        self._actions: list[Callable[[], object]] = []

    def later(self, action: Callable[[], object], *tensors: Tensor) -> DelayedWork:
        """Have `action` happen to the tensors once it is time; return self."""
        if self._stream is None:
            self._actions.append(action)
            return self
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(DELAY_CYCLES)
            action()
            self._event = torch.cuda.Event()
            self._event.record()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let it happen (CPU), or have the current stream wait for it (GPU)."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        while self._actions:
            self._actions.pop(0)()
        return True

    def is_completed(self) -> bool:
        """Return whether it has happened."""
        return not self._actions and (self._event is None or self._event.query())

    def with_it(self, other: DelayedWork) -> None:
        """Be done when the other one is."""
        self._event = other._event


class DelayedGroup(dist.ProcessGroup):
    """This rank and its echoes."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._receives: list[tuple[Tensor, DelayedWork]] = []
        self._sends: list[tuple[Tensor, DelayedWork]] = []
        self._stream: torch.cuda.Stream | None = None

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name under which it is registered."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name by which torch finds it, and forgets it at last."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> DelayedWork:
        """Send to an echo, which sends the same."""
        work = self._work(tensors[0])
        self._sends.append((tensors[0], work))
        self._match()
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> DelayedWork:
        """Receive what this rank sends at the same time."""
        work = self._work(tensors[0])
        self._receives.append((tensors[0], work))
        self._match()
        return work

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> DelayedWork:
        """Sum equal tensors, or take their maximum or minimum."""
        total = tensors[0]
        factor = self.size() if options.reduceOp == dist.ReduceOp.SUM else 1
        return self._work(total).later(lambda: total.mul_(factor), total)

    def broadcast(self, tensors: list[Tensor], options: object = None) -> DelayedWork:
        """Leave the tensor as it is."""
        return self._work(tensors[0])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object = None) -> DelayedWork:
        """Copy this rank's tensor for every rank."""
        copies = lambda: [output.copy_(inputs[0]) for output in outputs[0]]  # noqa: E731
        return self._work(inputs[0]).later(copies, *outputs[0], inputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, options: object = None) -> DelayedWork:
        """Gather in place: the others' parts hold what equal workers have there, this rank's value of them."""
        return self._work(output).later(lambda: output.copy_(output.clone()), output)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: object = None) -> DelayedWork:
        """Sum this rank's part over equal tensors."""
        own = source.chunk(self.size())[self.rank()]
        return self._work(output).later(lambda: torch.mul(own, self.size(), out=output), output, source)

    # Names of the two above in other versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, options: object = None) -> DelayedWork:
        """Wait for nobody."""
        return DelayedWork(None)

    def _work(self, tensor: Tensor) -> DelayedWork:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        return DelayedWork(self._stream if tensor.is_cuda else None)

    def _match(self) -> None:
        """Give the oldest receive the oldest message of its size, if one was sent."""
        while self._receives:
            target, received = self._receives[0]
            found = next((i for i, (source, _) in enumerate(self._sends) if source.numel() == target.numel()), None)
            if found is None:
                return
            source, sent = self._sends.pop(found)
            self._receives.pop(0)
            received.later(partial(target.copy_, source), target, source)
            sent.with_it(received)


@contextlib.contextmanager
def delayed_group(n: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of n, of which the others are echoes, until the end of the block."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=rank, world_size=n, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _create(store: object, rank: int, size: int, timeout: object) -> DelayedGroup:
    return DelayedGroup(rank, size)
