"""Replay what all ranks queued by NCCL's rules, and say who waits for whom if it does not end.

- A communicator runs what was posted on it in order; a collective when all its ranks have come to it.
- The messages of a batch run together: it is done when each has met its peer's. The k-th send from a rank to another
  meets the k-th receive there of that communicator, whatever their tags.
- The first operation on a communicator blocks the host until all its ranks have called one.
- A host sync blocks the host until its stream has come there.

With `one_at_a_time` a device runs the messages of all its communicators in the order in which they were posted, as
when their kernels leave no room for each other.
"""

from collections import defaultdict
from collections.abc import Sequence

from tests.cuda.device import Entry, Group, Trace

Place = tuple[int, int]  # rank, number of the entry


class DeadlockError(AssertionError):
    """Some ranks wait for ever; the message names each, and what it waits for."""


class MismatchError(AssertionError):
    """A message, or a collective, has no counterpart that fits."""


def replay(traces: Sequence[Trace], one_at_a_time: bool = False) -> int:
    """Run all traces to their ends; return the number of messages. Raises DeadlockError or MismatchError."""
    if any(trace.created != traces[0].created for trace in traces):
        raise MismatchError("ranks make different communicators, or in another order")
    partners = match(traces)
    before = [behind_others(trace.entries) if one_at_a_time else [()] * len(trace.entries) for trace in traces]
    host = [0] * len(traces)
    waiting: list[list[int]] = [[] for _ in traces]  # queued and not done
    begun: set[Place] = set()
    done: list[set[int]] = [set() for _ in traces]
    opened: dict[Group, set[int]] = defaultdict(set)
    progress = True
    while progress:
        progress = False
        for rank, trace in enumerate(traces):
            while host[rank] < len(trace.entries):
                number = host[rank]
                entry = trace.entries[number]
                if entry.what == "host sync" and not entry.after <= done[rank]:
                    break
                if entry.group is not None and rank not in opened[entry.group]:
                    opened[entry.group].add(rank)
                    progress = True
                if entry.group is not None and len(opened[entry.group]) < len(entry.group.ranks):
                    break
                waiting[rank].append(number)
                host[rank] += 1
                progress = True
            left = []
            for number in waiting[rank]:
                entry, place = trace.entries[number], (rank, number)
                if place not in begun:
                    if not (entry.after <= done[rank] and done[rank].issuperset(before[rank][number])):
                        left.append(number)
                        continue
                    begun.add(place)
                    progress = True
                if begun.issuperset(partners.get(place, ())):
                    done[rank].add(number)
                    progress = True
                else:
                    left.append(number)
            waiting[rank] = left
    stuck = [rank for rank, trace in enumerate(traces) if len(done[rank]) < len(trace.entries)]
    if stuck:
        raise DeadlockError("; ".join(describe(traces[rank], host[rank], waiting[rank]) for rank in stuck))
    return sum(entry.group is not None for trace in traces for entry in trace.entries)


def match(traces: Sequence[Trace]) -> dict[Place, list[Place]]:
    """Return for every message the entries of other ranks that it meets."""
    partners: dict[Place, list[Place]] = defaultdict(list)
    collectives: dict[tuple[Group, int], list[Place]] = defaultdict(list)
    sides: dict[str, dict[tuple[Group, int, int], list[tuple[Place, int]]]] = {
        "send": defaultdict(list),
        "recv": defaultdict(list),
    }
    for rank, trace in enumerate(traces):
        count: dict[Group, int] = defaultdict(int)
        for number, entry in enumerate(trace.entries):
            if entry.group is None:
                continue
            for transfer in entry.transfers:
                ends = (rank, transfer.peer) if transfer.kind == "send" else (transfer.peer, rank)
                sides[transfer.kind][entry.group, *ends].append(((rank, number), transfer.bytes))
            if entry.what != "batch":
                collectives[entry.group, count[entry.group]].append((rank, number))
                count[entry.group] += 1
    for (group, index), places in collectives.items():
        kinds = {(traces[rank].entries[number].what, traces[rank].entries[number].bytes) for rank, number in places}
        if len(kinds) > 1 or {rank for rank, _ in places} != set(group.ranks):
            raise MismatchError(
                f"collective {index} of ranks {group.ranks}: {kinds} by ranks {[rank for rank, _ in places]}"
            )
        for place in places:
            partners[place] = [other for other in places if other != place]
    for ends in sides["send"].keys() | sides["recv"].keys():
        sends, receives = sides["send"][ends], sides["recv"][ends]
        if [size for _, size in sends] != [size for _, size in receives]:
            _, source, target = ends
            raise MismatchError(
                f"rank {source} sends rank {target} messages of {[size for _, size in sends]} bytes, which expects "
                f"{[size for _, size in receives]}"
            )
        for (one, _), (other, _) in zip(sends, receives, strict=True):
            partners[one].append(other)
            partners[other].append(one)
    return partners


def behind_others(entries: Sequence[Entry]) -> list[tuple[int, ...]]:
    """Return for every message the one that was posted before it, on whatever communicator."""
    before: list[tuple[int, ...]] = []
    last: tuple[int, ...] = ()
    for number, entry in enumerate(entries):
        before.append(last if entry.group is not None else ())
        last = (number,) if entry.group is not None else last
    return before


def describe(trace: Trace, host: int, waiting: Sequence[int]) -> str:
    """Say what a rank waits for."""
    entry = trace.entries[min([*waiting, host])] if waiting or host < len(trace.entries) else trace.entries[-1]
    where = f"rank {trace.rank} waits in {entry.what} ({entry.label})"
    peers = sorted({transfer.peer for transfer in entry.transfers})
    return f"{where} with {peers}" if peers else f"{where} of {entry.group.ranks}" if entry.group else where


def depends_on(trace: Trace, number: int, others: Sequence[int]) -> list[int]:
    """Return those of `others` that entry `number` waits for."""
    seen, left = {number}, [number]
    while left:
        for before in trace.entries[left.pop()].after - seen:
            seen.add(before)
            left.append(before)
    return [other for other in others if other in seen]
