"""The few collectives that the project needs; all are no-ops in a single process.

Also `meet`: before they act together, ranks compare where they are, so that errors name a rank that is out of step.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.streams import is_queued
from common.rank_environment import from_launcher

# What a rank that is out of step has usually done.
SKIPPED = (
    "skipped optimizer.step(), for example by torch.amp.GradScaler after an overflow (use common.parallel.GradScaler) "
    "or by `if not isfinite(loss): continue`"
)
GLOOS_WORDS = ("gloo/", "pair closure")  # in gloo's errors, which are plain RuntimeErrors


class PeerError(RuntimeError):
    """A message or a collective failed: a peer died, runs fewer steps, or is slower than the timeout allows."""


def is_distributed() -> bool:
    """Return whether a default process group exists.

    Raises RuntimeError when a launcher announced several processes (WORLD_SIZE > 1) but the process
    group is not initialised: continuing would train that many unconnected models.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    announced = from_launcher("WORLD_SIZE") or 1
    if announced > 1:
        raise RuntimeError(
            f"WORLD_SIZE={announced} but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first"
        )
    return False


def world_size() -> int:
    """Return the number of ranks of the default process group, 1 without one."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Return the rank of this process in the default process group, 0 without one."""
    return dist.get_rank() if is_distributed() else 0


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn a RuntimeError into a PeerError naming the collective, rank and who must take part; also a decorator."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank()}: {what} failed: all {world_size()} ranks must take part, at the same point of the "
            f"training; a peer died, runs fewer steps, or is slower than the timeout allows ({error})"
        ) from error


@contextlib.contextmanager
def explained_if_lost(what: str) -> Iterator[None]:
    """Like `explained`, for blocks that may raise other errors too: only those of process groups become PeerErrors."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(words in str(error) for words in GLOOS_WORDS)):
            raise
        with explained(what):
            raise


@explained("a sum over all ranks")
def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `values` over all ranks, in place; equal on all ranks afterwards. Collective."""
    if is_distributed():
        dist.all_reduce(values, group=group)
    return values


@explained("an exchange of small objects")
def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on all ranks; wait for all. Collective."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every tensor with the group's first rank's, bit for bit and for any dtype. Collective.

    On CPUs, whose links are slow, no tensor is sent if all ranks already hold the same bits, as after equal seeds.
    """
    tensors = list(tensors)
    if not tensors or not is_distributed():
        return
    if not any(is_queued(tensor.device) for tensor in tensors) and _equal_on_all_ranks(tensors, group):
        return
    for tensor in tensors:
        whole = sendable(tensor.detach().contiguous(), group)
        message = as_bytes(whole)
        if message.numel():
            dist.broadcast(message, group=group, group_src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)


def sendable(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensor, or a copy on this process's GPU if the group cannot send from CPUs, as with NCCL."""
    on_cpu = tensor.device.type == "cpu" and is_distributed()
    return tensor.cuda() if on_cpu and dist.get_backend(group) == dist.Backend.NCCL else tensor


def as_bytes(contiguous: Tensor) -> Tensor:
    """Return the same memory as bytes [n]: gloo supports neither bool nor complex, and copies need no arithmetic."""
    return contiguous.reshape(-1).view(torch.uint8)


def _equal_on_all_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> bool:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(as_bytes(tensor.detach().contiguous()).numpy())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return all(torch.equal(mine, theirs) for theirs in everyone)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 for 16-bit ones, else `dtype` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@explained("an average over all ranks")
def mean_over_ranks_(tensors: Sequence[Tensor], n: int, group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the `n` ranks of the group, in place. Collective.

    16-bit tensors are summed in float32 and rounded once.
    """
    if n == 1:
        return
    for tensor in tensors:
        wide = tensor.to(sum_dtype(tensor.dtype))
        dist.all_reduce(wide, group=group)
        tensor.copy_(wide.div_(n))


class Place(NamedTuple):
    """The point that a rank has reached in training.

    operation:   the call it makes
    clock:       updates it has committed
    launched:    fragments whose messages are in flight
    interrupted: whether an exception ended its last `optimizer.step()`
    """

    operation: str
    clock: int
    launched: tuple[int, ...]
    interrupted: bool


def meet(own: Place, group: dist.ProcessGroup) -> None:
    """Compare the places of all ranks of the group. Collective.

    Raises PeerError on every rank, naming the ranks that differ, or if a rank does not arrive in time.
    """
    places: list[Place] = [own] * dist.get_world_size(group)
    with explained(own.operation):
        dist.all_gather_object(places, own, group=group)
    wrong = difference(places)
    if wrong is not None:
        raise PeerError(f"{own.operation}: {wrong}")


def difference(places: list[Place]) -> str | None:
    """Return a sentence that names the ranks at another point; None if all are at the same one."""

    def ranks(chosen: list[bool]) -> list[int]:
        return [rank for rank, choice in enumerate(chosen) if choice]

    operations = dict.fromkeys(place.operation for place in places)
    if len(operations) > 1:
        calls = (f"{name} by ranks {ranks([place.operation == name for place in places])}" for name in operations)
        return f"expected the same call on every rank, got {', '.join(calls)}"
    interrupted = ranks([place.interrupted for place in places])
    if 0 < len(interrupted) < len(places):
        return (
            f"an exception ended optimizer.step() on ranks {interrupted} alone, update {places[interrupted[0]].clock}: "
            "call close(), wrap the module anew, and load a checkpoint"
        )
    last = max(place.clock for place in places)
    behind = [f"rank {rank} is behind: clock {place.clock}" for rank, place in enumerate(places) if place.clock < last]
    if behind:
        return f"{', '.join(behind)}, expected {last}: it {SKIPPED}"
    launched = max((place.launched for place in places), key=len)
    ahead = ranks([place.launched == launched for place in places])
    if len(ahead) < len(places):
        return (
            f"ranks {ahead} alone ran a training forward after {last} updates, which sent messages: run one that "
            "trains nothing, such as a summary, on model.module or under torch.no_grad()"
        )
    return None
