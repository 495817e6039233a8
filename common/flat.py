"""Parameters of one dtype as views of one flat vector, cut into equal buckets.

Mixing acts on each coordinate alone, so buckets need not respect parameter boundaries: they are all about the
same size, however large a single (tied) embedding is. Sends read the vector in place.
"""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.dtensors import is_dtensor
from common.torch_internals import version_of

ALIGNMENT_BYTES = 64  # of every parameter, as PyTorch's allocator aligns it, so that kernels take the same path


@dataclass
class Bucket:
    """The slice `span` of flat vector number `vector`."""

    vector: int
    span: slice


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the vector: `offset` in elements, with the parameter's own strides."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def layout(
    named_parameters: Sequence[tuple[str, Tensor]], sizes: Sequence[int] | None = None
) -> tuple[list[Slot], int]:
    """Return slots one after another, each aligned, and the length of the vector in elements.

    sizes: number of elements reserved for each parameter, if more than its own; the rest stay 0

    Memory formats survive: a channels_last weight keeps its strides.
    """
    slots, end = [], 0
    for index, (name, parameter) in enumerate(named_parameters):
        alignment = max(1, ALIGNMENT_BYTES // parameter.element_size())
        offset = -(-end // alignment) * alignment
        dense = torch.empty_like(parameter, device="meta")  # dense strides in the parameter's own order
        slots.append(Slot(name, offset, tuple(parameter.shape), dense.stride()))
        end = offset + (sizes[index] if sizes is not None else parameter.numel())
    return slots, end


class FlatVector:
    """The parameters of one dtype and device in one vector `data` [numel]; they become views of it.

    named_parameters: at least one parameter, all of one dtype and device.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        first = named_parameters[0][1]
        self.slots, self.numel = self._layout(named_parameters)
        self.parameters = [parameter for _, parameter in named_parameters]
        self._versions: list[Hashable] | None = None
        self.homes: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []  # where modules hold them
        self._copy: Tensor | None = None  # of data at launch
        self.move_to(torch.zeros(self.numel, dtype=first.dtype, device=first.device))

    @torch.no_grad()
    def move_to(self, data: Tensor) -> "FlatVector":
        """Move the vector into the memory of `data` [numel] (a row of the simulator's matrix); return self."""
        self.data = data
        self._fill(self._values(parameter) for parameter in self.parameters)  # one by one: each frees its old memory
        return self

    @torch.no_grad()
    def group_by(self, key: Callable[[nn.Parameter], Hashable]) -> None:
        """Lay parameters with the same key side by side, in the same memory; the last parameter stays last.

        So neither the length of the vector nor its division into buckets changes.
        """
        keys = [key(parameter) for parameter in self.parameters]
        groups = [*(k for k in dict.fromkeys(keys) if k != keys[-1]), keys[-1]]
        order = sorted(range(len(keys)), key=lambda index: groups.index(keys[index]))
        if order == list(range(len(keys))):
            return
        values = [self._values(self.parameters[index]).clone() for index in order]
        named = [(self.slots[index].name, self.parameters[index]) for index in order]
        self.slots, _ = self._layout(named)
        self.parameters = [parameter for _, parameter in named]
        self.data.zero_()
        self._fill(values)

    def _fill(self, values: Iterable[Tensor]) -> None:
        for slot, parameter, view, value in zip(self.slots, self.parameters, self.views(), values, strict=True):
            view.copy_(value)
            self._attach(parameter, slot, view)

    # -- overridden where a rank holds shards of the parameters (`common.parallel.replica`)

    def _layout(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> tuple[list[Slot], int]:
        return layout(named_parameters)

    def _values(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def _attach(self, parameter: nn.Parameter, slot: Slot, view: Tensor) -> None:
        """Make the parameter a view of its slot."""
        parameter.data = view

    def _lies_at(self, parameter: nn.Parameter, address: int) -> bool:
        return parameter.data_ptr() == address or not parameter.numel()

    def _writes(self, parameter: nn.Parameter) -> Hashable:
        return version_of(parameter)

    def views(self) -> Iterator[Tensor]:
        """Yield the parameters' places in the vector, in order, as tensors without gradient."""
        yield from self.views_of(self.data)

    def views_of(self, data: Tensor) -> Iterator[Tensor]:
        """Yield the parameters' places in a vector with the same layout as this one."""
        for slot in self.slots:
            yield data.as_strided(slot.size, slot.stride, data.storage_offset() + slot.offset)

    def protect(self) -> None:
        """Record the parameters' versions: they must not be written until `release`.

        Writes through `.data` do not raise the version. To find them, set GOSSIP_CHECK_WRITES=1 in the environment:
        values are then compared too, which costs memory and time.
        """
        self._versions = [self._writes(parameter) for parameter in self.parameters]
        self._copy = self.data.clone() if os.environ.get("GOSSIP_CHECK_WRITES", "0") != "0" else None

    def release(self) -> None:
        """End the protection begun by `protect`."""
        self._versions = self._copy = None

    def check(self, where: str) -> None:
        """Raise RuntimeError naming the first parameter that moved, or was written while protected."""
        start, step = self.data.data_ptr(), self.data.element_size()
        replaced = {id(parameter) for of_module, key, parameter in self.homes if of_module.get(key) is not parameter}
        for index, (slot, parameter) in enumerate(zip(self.slots, self.parameters, strict=True)):
            if not self._lies_at(parameter, start + slot.offset * step) or id(parameter) in replaced:
                raise RuntimeError(
                    f"{where}: parameter '{slot.name}' is no longer a view of the flat vector that gossip mixes. "
                    "Call .to(...) (device, dtype, memory_format) on the module before wrapping it, and "
                    "load_state_dict() without assign=True; a module that two others share belongs in one wrapper: "
                    "wrap one module that holds them all."
                )
            if self._versions is not None and self._writes(parameter) != self._versions[index]:
                raise RuntimeError(_written(where, slot.name))
        if self._copy is not None:
            before = self.views_of(self._copy)
            for slot, view, copy in zip(self.slots, self.views(), before, strict=True):
                if not torch.equal(_bits(view), _bits(copy)):
                    raise RuntimeError(_written(where, slot.name))


def _bits(view: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes, in which NaN equals itself."""
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


def _written(where: str, name: str) -> str:
    return (
        f"{where}: parameter '{name}' was written while its message was in flight (between optimizer.step() and the "
        "next one). Write inside the step, or call .drain() on all ranks before writing; a module that writes its "
        "parameters in forward (nn.Embedding(max_norm=...), normalised weights) needs order='atc'. Writes through "
        ".data are seen only with GOSSIP_CHECK_WRITES=1."
    )


def flatten(module: nn.Module) -> list[FlatVector]:
    """Put all trainable parameters of the module into flat vectors, one for each (dtype, device).

    Tied parameters (one Parameter under several names) are laid out once. Frozen parameters stay where they are.

    Raises ValueError for DTensors, and for one whose memory another parameter or a buffer shares: they would silently
    come apart.
    """
    refuse_dtensors(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    others = (*module.named_parameters(), *module.named_buffers())
    refuse_overlaps([*named, *((name, tensor) for name, tensor in others if not tensor.requires_grad)])
    vectors = [FlatVector(group) for group in by_kind(named)]
    vector_of = {id(parameter): vector for vector in vectors for parameter in vector.parameters}
    for part in module.modules():
        for key, parameter in part._parameters.items() if isinstance(part._parameters, dict) else ():  # else scripted
            if id(parameter) in vector_of:
                vector_of[id(parameter)].homes.append((part._parameters, key, parameter))
    return vectors


def by_kind(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the parameters grouped by (dtype, device): one vector can hold each group."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(kinds.values())


def refuse_dtensors(module: nn.Module) -> None:
    """Raise ValueError naming the first parameter that is a DTensor."""
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter '{name}' is a DTensor; expected tensors that this rank holds as a whole, or, for a module "
                "to which fully_shard was applied, DecentralizedDataParallel with ranks_per_worker"
            )


def refuse_overlaps(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError naming the first two different tensors that share memory, at least one of them trained."""
    spans = sorted(
        (t.untyped_storage().data_ptr(), t.data_ptr(), t[(-1,) * t.ndim].data_ptr() + t.itemsize, name, t.requires_grad)
        for name, t in named
        if t.numel() and t.layout == torch.strided and type(t.data) is Tensor  # others have no address
    )
    storage, end, former, trained = 0, 0, "", False  # of the span before that reaches furthest
    for own_storage, begin, stop, name, own in spans:
        shared = own_storage == storage and begin < end
        if shared and (own or trained):
            raise ValueError(
                f"'{former}' and '{name}' are different Parameters or buffers that share memory; tie them by "
                "assigning the same Parameter object instead, or clone one"
            )
        if not shared or stop > end:
            storage, end, former, trained = own_storage, stop, name, own


def cut(numel: int, element_size: int, bucket_bytes: float) -> list[slice]:
    """Cut a vector into the fewest equal slices of at most about `bucket_bytes` each (64-byte multiples)."""
    count = max(1, math.ceil(numel * element_size / bucket_bytes))
    alignment = max(1, ALIGNMENT_BYTES // element_size)
    size = max(alignment, -(-math.ceil(numel / count) // alignment) * alignment)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
