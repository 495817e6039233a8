"""What the steps of all optimizers share: the closure, and lists of tensors cut into chunks for `torch._foreach_*`.

An optimizer step is several element-wise passes over the same tensors and is bound by memory traffic. Run
over the whole model, every pass misses the cache and every temporary is as large as the model; run chunk by
chunk, on a CPU all passes after the first hit the cache, and temporaries never exceed one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from common.dtensors import local_parts

# Size of one chunk of one list. CPU: about six such chunks (parameter, gradient, state, temporaries) stay in
# the last-level cache; measured best of 64 KB ... 16 MB (from 1 MB on, glibc returns the temporaries to the
# system after every use). Other devices: large enough to hide kernel launches.
CPU_CHUNK_BYTES = 1 << 19
DEVICE_CHUNK_BYTES = 64 << 20


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return what the closure given to `step` returns, with gradients enabled; None if there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def chunked(
    lists: Sequence[Sequence[Tensor]], keys: Iterable[Hashable]
) -> Iterator[tuple[Hashable, list[list[Tensor]]]]:
    """Yield (key, chunk): a chunk holds a part of each list, all of one key, device and dtype.

    `lists` are lists of equal length whose entries at one index have equal shapes; the first one decides
    device and dtype; `keys` holds one key for each index. Tensors larger than a chunk are cut along their
    first dimension. The tensors themselves or views of them are yielded: write in place. For DTensors these
    are the local parts; see `local_parts` for the error that this raises.
    """
    open_chunks: dict[Hashable, tuple[int, list[list[Tensor]]]] = {}
    for key, *entries in zip(keys, *lists, strict=True):
        tensors = local_parts(entries)
        lead = tensors[0]
        limit = CPU_CHUNK_BYTES if lead.device.type == "cpu" else DEVICE_CHUNK_BYTES
        place = (key, lead.device, lead.dtype)
        for pieces in _cut(tensors, limit):
            size, chunk = open_chunks.get(place, (0, [[] for _ in lists]))
            if size and size + pieces[0].nbytes > limit:
                yield key, chunk
                size, chunk = 0, [[] for _ in lists]
            for tensor_list, piece in zip(chunk, pieces, strict=True):
                tensor_list.append(piece)
            open_chunks[place] = (size + pieces[0].nbytes, chunk)
    for (key, _, _), (_, chunk) in open_chunks.items():
        yield key, chunk


def scale_(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors of one device in place by `factor`, in full precision.

    On a CPU `torch._foreach_mul_` rounds the factor to the dtype of the tensors (in bfloat16 0.999 becomes
    1), and is no faster than this loop.
    """
    if tensors[0].device.type == "cpu":
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def _cut(tensors: Sequence[Tensor], limit: int) -> Iterable[Sequence[Tensor]]:
    """Cut tensors of one shape in the same way along dimension 0, into pieces of at most `limit` bytes (or one row)."""
    lead = tensors[0]
    if lead.nbytes <= limit or lead.dim() == 0:
        return [tensors]
    rows = max(1, limit * lead.shape[0] // lead.nbytes)
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def check_keys(where: str, what: str, found: Collection[str], expected: Collection[str]) -> None:
    """Raise ValueError if `what`, a part of a state dict, lacks one of the expected keys."""
    missing = [key for key in expected if key not in found]
    if missing:
        raise ValueError(
            f"{where}: {what} has no {missing}: expected a state dict of this optimizer, got keys {sorted(found)}"
        )


def dense_grad(where: str, param: Tensor) -> Tensor:
    """Return `param.grad`; raise RuntimeError if it is sparse."""
    if param.grad.layout != torch.strided:
        raise RuntimeError(
            f"{where}: gradient of the parameter of shape {tuple(param.shape)} has layout "
            f"{param.grad.layout}: expected a dense gradient (for an embedding, set sparse=False)"
        )
    return param.grad
