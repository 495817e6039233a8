"""What communication cost so far on this rank, and named spans in a profiler's trace."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

from torch.profiler import record_function

from common.torch_internals import is_profiling


@dataclass
class CommunicationCounters:
    """Cumulative counters of one rank.

    bytes_sent:        payload bytes of merged rounds that this rank handed to the network (see `common.topology.cost`);
                       what averages for evaluation send, or what they make a round send again, is not counted
    messages:          messages it sent
    rounds:            rounds merged: one for each committed update, with local steps one for each round of a fragment
    launch_to_merge_s: seconds between the launch of a round and its merge, summed, by the host's clock
    exposed_s:         seconds the rank stood still waiting for messages, summed; on a GPU by its stream, counted when
                       the device has passed the wait, so at most some steps later
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
    """`torch.profiler.record_function`, which costs 10 us even without a profiler: then this costs nothing."""
    return record_function(name) if is_profiling() else nullcontext()
