"""A GPU and its process group that only take notes, over tensors of the CPU.

`emulated()` replaces CUDA's streams and events and the functions of torch.distributed. What is queued becomes an
`Entry` of a `Trace`, with the entries that it comes after: the last ones of its stream, those that the stream was told
to wait for and, for a message, the last one of its communicator. Nothing else orders entries; that the host queues one
before the other does not. Kernels run at once, on the CPU; messages bring nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

HIERARCHICAL = "common.parallel.gossip.hierarchical"


@dataclass(frozen=True)
class Transfer:
    """One message of a batch: "send" or "recv", the global rank of the peer, bytes."""

    kind: str
    peer: int
    bytes: int


@dataclass
class Entry:
    """Something queued on the device, or a wait of the host.

    what:      "kernel", "host sync", "batch" (of messages), or a collective's name
    after:     the entries that are done before it begins
    group:     communicator; None for kernels
    transfers: of a batch
    bytes:     of a collective
    label:     for messages of errors
    """

    what: str
    after: frozenset[int]
    group: Group | None = None
    transfers: tuple[Transfer, ...] = ()
    bytes: int = 0
    label: str = ""


@dataclass(frozen=True)
class Group:
    """A communicator: number in the order of creation, and its ranks."""

    number: int
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)


class Stream:
    """A CUDA stream; what is queued on it next comes after the entries `frontier`."""

    def __init__(self, trace: Trace, frontier: frozenset[int] = frozenset()) -> None:
        self._trace = trace
        self.frontier = frontier

    def wait_stream(self, other: Stream) -> None:
        """As `torch.cuda.Stream.wait_stream`."""
        self.frontier |= other.frontier

    def wait_event(self, event: Event) -> None:
        """As `torch.cuda.Stream.wait_event`."""
        self.frontier |= event.snapshot

    def synchronize(self) -> None:
        """As `torch.cuda.Stream.synchronize`: blocks the host."""
        self._trace.host_sync("Stream.synchronize")


class Event:
    """A CUDA event. No time passes."""

    def __init__(self, trace: Trace, enable_timing: bool = False) -> None:
        self._trace = trace
        self.snapshot: frozenset[int] = frozenset()

    def record(self, stream: Stream | None = None) -> None:
        """As `torch.cuda.Event.record`."""
        self.snapshot = (stream or self._trace.current).frontier

    def query(self) -> bool:
        """Return True: the device is fast."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return 0 ms."""
        return 0.0

    def synchronize(self) -> None:
        """As `torch.cuda.Event.synchronize`: blocks the host."""
        self._trace.host_sync("Event.synchronize")


class Work:
    """What a posted message returns: waiting makes the current stream wait."""

    def __init__(self, trace: Trace, entry: int) -> None:
        self._trace, self._entry = trace, entry

    def wait(self, timeout: object = None) -> bool:
        """As NCCL's: a timeout would block the host until the message has arrived."""
        if timeout is not None:
            self._trace.current.frontier |= {self._entry}
            self._trace.host_sync("Work.wait with a timeout")
        self._trace.current.frontier |= {self._entry}
        return True

    def is_completed(self) -> bool:
        """Return True: the device is fast."""
        return True


@dataclass
class Trace:
    """What one rank queues. created: the communicators it took part in making, in order"""

    rank: int
    world_size: int
    entries: list[Entry] = field(default_factory=list)
    created: list[Group] = field(default_factory=list)
    label: str = ""

    def __post_init__(self) -> None:
        self._synced: frozenset[int] = frozenset()
        self._last: dict[Group, int] = {}  # of each communicator
        self.current = Stream(self)
        self.world = self.new_group(range(self.world_size))

    def stream(self, device: object = None) -> Stream:
        """Return a new stream."""
        return Stream(self, self._synced)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def queue(self, what: str, **others: Any) -> int:
        """Queue a kernel on the current stream; return the number of its entry."""
        number = len(self.entries)
        after = self.current.frontier | self._synced
        self.entries.append(Entry(what, after, label=self.label, **others))
        self.current.frontier = frozenset((number,))
        return number

    def host_sync(self, what: str) -> None:
        """Block the host until what was queued on the current stream is done."""
        number = self.queue("host sync")
        self.entries[number].label = f"{what} {self.label}"
        self._synced = frozenset((number,))

    def post(self, what: str, group: Group | None, **others: Any) -> Work:
        """Queue a message on its communicator, behind what the current stream has queued."""
        group = group or self.world
        number = len(self.entries)
        before = {self._last[group]} if group in self._last else set()
        after = self.current.frontier | self._synced | before
        self.entries.append(Entry(what, after, group, label=self.label, **others))
        self._last[group] = number
        return Work(self, number)

    def new_group(self, ranks: Sequence[int]) -> Group:
        """Make a communicator; all ranks do, in the same order."""
        group = Group(len(self.created), tuple(ranks))
        self.created.append(group)
        return group


@contextmanager
def replacing(functions: Mapping[str, object]) -> Iterator[None]:
    """Replace these functions, and take every device for one that runs behind the host."""
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch(name, function))
        for name, module in list(sys.modules.items()):
            if name.startswith("common.") and hasattr(module, "is_queued"):
                stack.enter_context(patch.object(module, "is_queued", lambda device: True))
        yield


class Idle:
    """A stream or an event without a device."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_, **__: True if name == "query" else 0.0


@contextmanager
def idle_streams() -> Iterator[None]:
    """Take the engine's path for GPUs: streams do nothing, messages are waited for where a stream would wait."""
    functions = {"torch.cuda.Stream": Idle, "torch.cuda.Event": Idle, "torch.cuda.current_stream": Idle}
    functions |= {
        "torch.cuda.synchronize": lambda _: None,
        "torch.cuda.stream": lambda _: nullcontext(),
        "torch.Tensor.record_stream": lambda *_: None,
    }
    with replacing(functions):
        yield


@contextmanager
def emulated() -> Iterator[SimpleNamespace]:
    """Replace CUDA and torch.distributed. Notes go to the yielded object's `trace`, which may be set anew."""
    here = SimpleNamespace(trace=Trace(0, 1))

    def collective(what: str, sent: Callable[..., Tensor]) -> Callable[..., Work]:
        def call(*arguments: Any, group: Group | None = None, async_op: bool = False, **_: Any) -> Work:
            work = here.trace.post(what, group, bytes=sent(*arguments).nbytes)
            if not async_op:
                work.wait()
            return work

        return call

    def batch(ops: Sequence[SimpleNamespace]) -> list[Work]:
        transfers = tuple(Transfer(op.kind, op.peer, op.tensor.nbytes) for op in ops)
        return [here.trace.post("batch", ops[0].group, transfers=transfers)]

    def message(op: Callable, tensor: Tensor, peer: int, group: Group | None = None, tag: int = 0) -> SimpleNamespace:
        kind = "send" if op is dist.isend else "recv"
        return SimpleNamespace(op=op, kind=kind, tensor=tensor, peer=peer, group=group or here.trace.world, tag=tag)

    def gather_objects(values: list, value: Any, group: Group | None = None) -> None:
        here.trace.post("all_gather_object", group)
        here.trace.host_sync("all_gather_object")
        values[:] = [value] * len(values)

    def rank(group: Group | None = None) -> int:
        ranks = (group or here.trace.world).ranks
        return ranks.index(here.trace.rank) if here.trace.rank in ranks else -1

    replaced = {
        "torch.cuda.Stream": lambda device=None: here.trace.stream(device),
        "torch.cuda.Event": lambda enable_timing=False: Event(here.trace, enable_timing),
        "torch.cuda.current_stream": lambda device=None: here.trace.current,
        "torch.cuda.stream": lambda stream: here.trace.on(stream),
        "torch.Tensor.record_stream": lambda tensor, stream: None,
        "torch.distributed.is_initialized": lambda: True,
        "torch.distributed.get_rank": rank,
        "torch.distributed.get_world_size": lambda group=None: len((group or here.trace.world).ranks),
        "torch.distributed.get_backend": lambda group=None: "gloo",  # its tensors lie on the CPU
        "torch.distributed.new_group": lambda ranks=None, **_: here.trace.new_group(
            range(here.trace.world_size) if ranks is None else ranks
        ),
        "torch.distributed.all_reduce": collective("all_reduce", lambda tensor: tensor),
        "torch.distributed.broadcast": collective("broadcast", lambda tensor, src=0: tensor),
        f"{HIERARCHICAL}.reduce_scatter_single": collective("reduce_scatter", lambda out, own: own),
        f"{HIERARCHICAL}.all_gather_single": collective("all_gather", lambda out, own: own),
        "torch.distributed.all_gather_object": gather_objects,
        "torch.distributed.batch_isend_irecv": batch,
        "torch.distributed.P2POp": message,
    }
    with replacing(replaced):
        yield here
