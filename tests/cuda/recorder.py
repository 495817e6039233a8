"""Notes which memory every kernel reads and writes, and finds what no event orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda.device import Trace, region_of

SYNCS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique2", "masked_select"}  # the host needs a value


class Recorder(TorchDispatchMode):
    """Queues every operation on tensors as a kernel of the trace; what brings a value to the host as a host sync.

    Memory stays allocated while it records, so that an address is one tensor's. `made` says on which stream.

    here: the emulated device, whose trace may be set anew
    """

    def __init__(self, here: SimpleNamespace) -> None:
        super().__init__()
        self._here = here
        self.made: dict[int, Allocation] = {}  # by address of the storage
        self._kept: list[Tensor] = []

    def forgotten(self, lasting: Sequence[Tensor]) -> set[str]:
        """Return the streams whose memory the allocator may give away while another stream still uses it.

        lasting: tensors that stay allocated
        """
        known = {(tensor.untyped_storage().data_ptr(), name) for tensor, name in self._here.lent}
        stays = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        return {
            made.stream
            for address, made in self.made.items()
            if address not in stays and any((address, name) not in known for name in made.used - {made.stream})
        }

    @property
    def trace(self) -> Trace:
        """The notes as they are now."""
        return self._here.trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reads = tuple(map(region_of, given))  # as they are before, as torch's sanitizer sees them
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._kept += [*given, *results]
        if name in SYNCS:
            self.trace.host_sync(name)
            return result
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, Tensor)
        ]
        written += [kwargs["out"]] if kwargs and isinstance(kwargs.get("out"), Tensor) else []
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in known]
        for tensor in new:
            self.made[tensor.untyped_storage().data_ptr()] = Allocation(self.trace.current.name)
        if (written or new) and not name.startswith("empty"):
            for tensor in (*given, *written):
                if (made := self.made.get(tensor.untyped_storage().data_ptr())) is not None:
                    made.used.add(self.trace.current.name)
            regions = [reads[next(i for i, other in enumerate(given) if other is tensor)] for tensor in written]
            number = self.trace.queue("kernel", reads=reads, writes=(*regions, *map(region_of, new)))
            self.trace.entries[number].label += f" {name}"
        return result


@dataclass
class Allocation:
    """The stream on which memory was allocated, and those on which it is used."""

    stream: str
    used: set[str] = field(default_factory=set)


def races(trace: Trace) -> list[str]:
    """Return a line for each pair of entries that use the same memory, one of them writing, in no order."""
    ancestors: list[int] = []  # a bit for each entry
    accesses: list[tuple[int, int, int, bool]] = []
    found = []
    for number, entry in enumerate(trace.entries):
        before = 0
        for other in entry.after:
            before |= ancestors[other] | 1 << other
        ancestors.append(before)
        accesses += [(*span, number, False) for span in entry.reads] + [(*span, number, True) for span in entry.writes]
    accesses.sort()
    active: list[tuple[int, int, int, bool]] = []
    for access in accesses:
        active = [other for other in active if other[1] > access[0]]
        for other in active:
            first, second = sorted((access[2], other[2]))
            if first != second and (access[3] or other[3]) and not ancestors[second] >> first & 1:
                found.append(f"{describe(trace, first)} and {describe(trace, second)}")
        active.append(access)
    return sorted(set(found))


def describe(trace: Trace, number: int) -> str:
    """Return what an entry is."""
    entry = trace.entries[number]
    return f"[{number}] {entry.what} {entry.label} on {entry.stream}"


def depends_on(trace: Trace, number: int, others: Sequence[int]) -> list[int]:
    """Return those of `others` that entry `number` waits for."""
    seen, left = {number}, [number]
    while left:
        for before in trace.entries[left.pop()].after - seen:
            seen.add(before)
            left.append(before)
    return [other for other in others if other in seen]
