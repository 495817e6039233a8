"""What the ranks compare before they act together, so that one that is out of step is named, and not waited for."""

from typing import NamedTuple

import torch.distributed as dist

from common.parallel.collectives import SKIPPED, PeerError, explained


class Place(NamedTuple):
    """Where a rank is in the training.

    operation:   what it calls
    clock:       updates it has committed
    launched:    fragments whose messages are in flight
    interrupted: whether an exception has ended its last `optimizer.step()`
    """

    operation: str
    clock: int
    launched: tuple[int, ...]
    interrupted: bool


def meet(own: Place, group: dist.ProcessGroup) -> None:
    """Compare the places of all ranks of the group. Collective.

    Raises PeerError on every rank, naming those that differ; or where a rank does not come in time.
    """
    places: list[Place] = [own] * dist.get_world_size(group)
    with explained(own.operation):
        dist.all_gather_object(places, own, group=group)
    wrong = difference(places)
    if wrong is not None:
        raise PeerError(f"{own.operation}: {wrong}")


def difference(places: list[Place]) -> str | None:
    """Return a sentence that says which ranks are elsewhere; None if all are at the same point."""

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
