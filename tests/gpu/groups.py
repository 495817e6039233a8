"""Process groups for machines with a single GPU, and none: echoes of a rank, messages that pass through the host.

Delayed: the other ranks are echoes of this one; every message arrives late, with this rank's own content. As all
workers are equal, mixing must change nothing: a training with messages has to end as one without, unless messages are
read before they have arrived, or parameters are written while they are still being sent.

Staged: gloo, which sends no memory of GPUs, carries copies on the host. For ranks that share a GPU where NCCL cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

DELAY_CYCLES = 2_000_000  # of the GPU, about a millisecond


class NamedGroup(dist.ProcessGroup):
    """A process group written in Python."""

    name = ""  # of the backend

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group_name = ""

    def getBackendName(self) -> str:  # noqa: N802
        return self.name

    def _get_backend(self, device: torch.device) -> NamedGroup:
        """Return what carries messages: `batch_isend_irecv` asks any group for it from 2.14 on."""
        return self

    @property
    def group_name(self) -> str:
        """The name by which torch finds it, and forgets it at last."""
        self._group_name = dist.distributed_c10d._world.pg_names.get(self, self._group_name)
        return self._group_name


class DelayedWork(dist.Work):
    """Something that happens to tensors later: on a GPU on the stream of messages, on a CPU when it is waited for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._stream = stream
        self.event: torch.cuda.Event | None = None
        self._actions: list[Callable[[], object]] = []

    def later(self, action: Callable[[], object], *tensors: Tensor) -> DelayedWork:
        if self._stream is None:
            self._actions.append(action)
            return self
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(DELAY_CYCLES)
            action()
            self.event = torch.cuda.Event()
            self.event.record()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        while self._actions:
            self._actions.pop(0)()
        return True

    def is_completed(self) -> bool:
        return not self._actions and (self.event is None or self.event.query())


class DelayedGroup(NamedGroup):
    """This rank and its echoes."""

    name = "delayed"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._receives: list[tuple[Tensor, DelayedWork]] = []
        self._sends: list[tuple[Tensor, DelayedWork]] = []
        self._stream: torch.cuda.Stream | None = None

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> DelayedWork:
        return self._meet(self._sends, tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> DelayedWork:
        return self._meet(self._receives, tensors[0])

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> DelayedWork:
        factor = self.size() if options.reduceOp == dist.ReduceOp.SUM else 1
        return self._work(tensors[0]).later(lambda: tensors[0].mul_(factor), tensors[0])

    def broadcast(self, tensors: list[Tensor], options: object = None) -> DelayedWork:
        return self._work(tensors[0])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object = None) -> DelayedWork:
        copies = lambda: [output.copy_(inputs[0]) for output in outputs[0]]  # noqa: E731
        return self._work(inputs[0]).later(copies, *outputs[0], inputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, options: object = None) -> DelayedWork:
        """Gather this rank's part n times; in place the others' parts hold what equal workers have there."""
        if source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            return self._work(output).later(lambda: output.copy_(output.clone()), output)
        copies = lambda: [part.copy_(source) for part in output.chunk(self.size())]  # noqa: E731
        return self._work(output).later(copies, output, source)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: object = None) -> DelayedWork:
        own = source.chunk(self.size())[self.rank()]
        return self._work(output).later(lambda: torch.mul(own, self.size(), out=output), output, source)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # before 2.13

    def barrier(self, opts: object = None) -> DelayedWork:
        return DelayedWork(None)

    def _work(self, tensor: Tensor) -> DelayedWork:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        return DelayedWork(self._stream if tensor.is_cuda else None)

    def _meet(self, side: list[tuple[Tensor, DelayedWork]], tensor: Tensor) -> DelayedWork:
        """Give the oldest receive the oldest message of its size, if one was sent."""
        work = self._work(tensor)
        side.append((tensor, work))
        while self._receives:
            target, received = self._receives[0]
            found = next((i for i, (source, _) in enumerate(self._sends) if source.numel() == target.numel()), None)
            if found is None:
                break
            source, sent = self._sends.pop(found)
            self._receives.pop(0)
            received.later(partial(target.copy_, source), target, source)
            sent.event = received.event
        return work


class StagedWork(dist.Work):
    """A work of gloo, and the tensors that take what its copies hold when it is waited for."""

    def __init__(self, work: dist.Work, copies: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._copies, self._targets = work, copies, targets

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(*([] if timeout is None else [timeout]))
        for target, copy in zip(self._targets, self._copies, strict=False):
            target.copy_(copy)
        self._targets = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class StagedGroup(NamedGroup):
    """A group whose messages pass through the host."""

    name = "staged"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        copies = _copied(tensors)
        return StagedWork(self._gloo.send(copies, peer, tag), copies, ())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        copies = _copied(tensors)
        return StagedWork(self._gloo.recv(copies, peer, tag), copies, tensors)

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> StagedWork:
        copies = _copied(tensors)
        return StagedWork(self._gloo.allreduce(copies, options), copies, tensors)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> StagedWork:
        copies = _copied(tensors)
        return StagedWork(self._gloo.broadcast(copies, options), copies, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: object) -> StagedWork:
        copies = _copied(outputs[0])
        return StagedWork(self._gloo.allgather([copies], _copied(inputs), *options), copies, outputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, *options: object) -> StagedWork:
        copies = list(_copied([output])[0].chunk(self.size()))
        return StagedWork(self._gloo.allgather([copies], _copied([source])), copies, output.chunk(self.size()))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, *options: object) -> StagedWork:
        copies = _copied([source])
        own = copies[0].chunk(self.size())[self.rank()]
        return StagedWork(self._gloo.allreduce(copies), [own], [output])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # before 2.13

    def barrier(self, opts: object = None) -> StagedWork:
        return StagedWork(self._gloo.barrier(), (), ())


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def register_staged() -> None:
    """Let process groups be opened with the backend "staged"."""
    if StagedGroup.name not in dist.Backend.backend_list:
        dist.Backend.register_backend(StagedGroup.name, StagedGroup, devices=["cpu", "cuda"])


@contextlib.contextmanager
def delayed_group(n: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of n, of which the others are echoes, until the end of the block."""
    if DelayedGroup.name not in dist.Backend.backend_list:
        create = lambda store, rank, size, timeout: DelayedGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend(DelayedGroup.name, create, devices=["cpu", "cuda"])
    dist.init_process_group(DelayedGroup.name, rank=rank, world_size=n, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
