"""Counters of what communication has cost this rank so far, and named spans in a profiler's trace."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

from torch.profiler import record_function

from common.torch_internals import is_profiling


@dataclass
class CommunicationCounters:
    """Cumulative counters of one rank.

    bytes_sent:        payload bytes of merged rounds that this rank handed to the network (see `common.topology.cost`);
                       averages are not counted, and a round that is dropped and launched again counts once
    messages:          messages it sent
    rounds:            rounds merged: one for each committed update, with local steps one for each round of a fragment
    launch_to_merge_s: seconds between the launch of a round and its merge, summed, by the host's clock
    exposed_s:         seconds the rank was blocked waiting for messages, summed; on a GPU, its stream, counted once the
                       device has passed the wait, so up to a few steps later
    """

    bytes_sent: float = 0.0
    messages: int = 0
    rounds: int = 0
    launch_to_merge_s: float = 0.0
    exposed_s: float = 0.0

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)


def region(name: str) -> AbstractContextManager[object]:
    """Return `torch.profiler.record_function` under a profiler, else a no-op: it costs 10 us even without one."""
    return record_function(name) if is_profiling() else nullcontext()
