"""DTensors: access to the part of a tensor that this rank holds, as FSDP2 (`fully_shard`) leaves it in the parameters.

Element-wise operations, such as an optimizer's update or mixing, act on these parts. They must not act on the DTensors:
`torch.split` of a DTensor along the sharded dimension, for instance, returns copies, and writes to them are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.torch_internals import is_dtensor, local

if TYPE_CHECKING:  # torch.distributed.tensor takes a second to import, and most runs need none
    from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's values as a plain tensor, gathered from the ranks that share it (collective); others as is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the local parts of tensors of one shape: a parameter, its gradient and its state.

    Raises RuntimeError if one is placed differently from the first: the parts would not be the same elements.
    """
    if not any(map(is_dtensor, tensors)):
        return tensors
    lead = tensors[0]
    for tensor in tensors[1:]:
        if placement(tensor) != placement(lead):
            raise RuntimeError(
                f"a parameter of shape {tuple(lead.shape)} is placed as {_words(lead)}, its gradient or optimizer "
                f"state as {_words(tensor)}: expected equal placements; DTensor.redistribute() changes them"
            )
    return [local(tensor) for tensor in tensors]


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Increment the versions of DTensors among these, as autograd does on in-place writes: local parts were written."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if is_dtensor(tensor)])


def placed_as(reference: Tensor, part: Tensor) -> Tensor:
    """Return a DTensor placed as `reference` whose local part has the memory of `part`; for other tensors, `part`."""
    if not is_dtensor(reference):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = placement(reference)
    part = torch.from_dlpack(part)  # at the start of its storage: a DTensor that is not cannot be copied (deepcopy)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=reference.shape, stride=reference.stride())


def placement(tensor: Tensor | DTensor) -> tuple | None:
    """Return (mesh, placements) of a DTensor; None for any other tensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def _words(tensor: Tensor) -> str:
    return f"{tensor.placements} on ranks {tensor.device_mesh.mesh.tolist()}" if is_dtensor(tensor) else "no DTensor"
