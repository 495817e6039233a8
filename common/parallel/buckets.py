"""The buckets of a training: slices of the flat vectors, each with a schedule of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from common.parallel.flat import cut
from common.topology import Round, Topology, in_phases


@dataclass
class Bucket:
    """A slice of one flat vector with a schedule and a clock of its own.

    vector: index of the flat vector
    clock:  counts the rounds that this bucket merged; round `clock` of `topology` comes next
    """

    vector: int
    span: slice
    topology: Topology
    clock: int = 0

    @property
    def round(self) -> Round:
        """The round that comes next."""
        return self.topology.round(self.clock)


def plan_buckets(vectors: Sequence[Tensor], topology: Topology, bucket_mb: float, phases: str) -> list[Bucket]:
    """Cut the vectors [numel] into buckets of at most about `bucket_mb` MiB.

    phases: "aligned", or "staggered": every second bucket runs the rounds in the other order of
    `common.topology.phases`. Raises ValueError where the topology cannot be staggered.
    """
    schedules = in_phases(topology, phases)
    spans = [
        (index, span)
        for index, vector in enumerate(vectors)
        for span in cut(vector.numel(), vector.element_size(), bucket_mb * 2**20)
    ]
    return [Bucket(vector, span, schedules[i % len(schedules)]) for i, (vector, span) in enumerate(spans)]
