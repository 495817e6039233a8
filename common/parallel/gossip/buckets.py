"""The buckets of a training: slices of the flat vectors, each with its schedule and clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from common.flat import Bucket, cut
from common.parallel.streams import is_queued
from common.topology import Topology, allreduce_messages, in_phases

LARGEST_MB = 25.0  # of what is all-reduced, as DDP's buckets
# bucket_mb="auto": small messages suit slow links; on a GPU each bucket is a launch, and links are fast.
AUTO_MB, AUTO_QUEUED_MB = 2.0, 64.0


@dataclass
class ScheduledBucket(Bucket):
    """A bucket that mixes by `topology`; `clock` counts the rounds it has merged, so round `clock` comes next."""

    topology: Topology
    clock: int = 0


def bucket_bytes(topology: Topology, bucket_mb: float) -> float:
    """Return the bytes of a bucket whose messages have `bucket_mb` MiB.

    An all-reduce cuts a bucket into a message for each member, and small ones cost it more than they save. So where all
    rounds travel that way buckets are as many times larger, up to DDP's.
    """
    rounds = [topology.round(t) for t in range(topology.period or 0)]
    talking = [round_ for round_ in rounds if not round_.is_idle]
    messages = min((allreduce_messages(round_, topology.workers_per_host) for round_ in talking), default=1)
    return max(bucket_mb, min(bucket_mb * messages, LARGEST_MB)) * 2**20


def plan_buckets(
    vectors: Sequence[Tensor], topology: Topology, bucket_mb: float | Literal["auto"], phases: str
) -> list[ScheduledBucket]:
    """Cut the vectors [numel] into buckets of which messages have at most about `bucket_mb` MiB.

    bucket_mb: "auto": 2 on the CPU, 64 on a GPU
    phases:    "aligned", or "staggered": every second bucket runs the rounds in the other order of
               `common.topology.phases`

    Raises ValueError where the topology cannot be staggered.
    """
    schedules = in_phases(topology, phases)
    if bucket_mb == "auto":
        queued = any(is_queued(vector.device) for vector in vectors)
        bucket_mb = AUTO_QUEUED_MB if queued else AUTO_MB
    spans = [
        (index, span)
        for index, vector in enumerate(vectors)
        for span in cut(vector.numel(), vector.element_size(), bucket_bytes(topology, bucket_mb))
    ]
    return [ScheduledBucket(vector, span, schedules[i % len(schedules)]) for i, (vector, span) in enumerate(spans)]
