"""The buckets of a training run: slices of the flat vectors, each with its schedule and clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from common.flat import Bucket, cut
from common.parallel.streams import is_queued
from common.topology import Topology, allreduce_messages, in_phases

LARGEST_MB = 25.0  # of a bucket that is all-reduced, as in DDP
# bucket_mb="auto": small messages suit slow links; on a GPU each bucket is a launch, and links are fast.
AUTO_MB, AUTO_QUEUED_MB = 2.0, 64.0


@dataclass
class ScheduledBucket(Bucket):
    """A bucket that mixes by `topology`; `clock` counts the rounds it has merged, so round `clock` comes next.

    fragment: number of the run of buckets it belongs to, whose rounds are launched and merged together
    """

    topology: Topology
    clock: int = 0
    fragment: int = 0


def bucket_bytes(topology: Topology, bucket_mb: float) -> float:
    """Return the bytes of a bucket whose messages have `bucket_mb` MiB.

    An all-reduce cuts a bucket into one message per member, and small messages cost it more than they save. So if all
    rounds travel that way, buckets are that many times larger, up to DDP's size.
    """
    rounds = [topology.round(t) for t in range(topology.period or 0)]
    talking = [round_ for round_ in rounds if not round_.is_idle]
    messages = min((allreduce_messages(round_, topology.workers_per_host) for round_ in talking), default=1)
    return max(bucket_mb, min(bucket_mb * messages, LARGEST_MB)) * 2**20


def plan_buckets(
    vectors: Sequence[Tensor], topology: Topology, bucket_mb: float | Literal["auto"], phases: str, fragments: int = 1
) -> list[ScheduledBucket]:
    """Split the vectors [numel] into buckets whose messages are at most about `bucket_mb` MiB.

    bucket_mb: "auto": 2 on the CPU, 64 on a GPU
    phases:    "aligned", or "staggered": every second bucket runs the rounds in the other order of
               `common.topology.schedule`
    fragments: number of runs of successive buckets, as equal as buckets allow, that have rounds of their own

    Raises ValueError where the topology cannot be staggered, or the vectors have fewer buckets than fragments.
    """
    schedules = in_phases(topology, phases)
    if bucket_mb == "auto":
        queued = any(is_queued(vector.device) for vector in vectors)
        bucket_mb = AUTO_QUEUED_MB if queued else AUTO_MB
    size = bucket_bytes(topology, bucket_mb)
    if fragments > 1:
        size = min(size, max(1, sum(vector.nbytes for vector in vectors) / fragments))
    spans = [
        (index, span)
        for index, vector in enumerate(vectors)
        for span in cut(vector.numel(), vector.element_size(), size)
    ]
    if 0 < len(spans) < fragments:
        raise ValueError(
            f"fragments={fragments}: expected at most the number of buckets, {len(spans)}: a fragment is a run of them"
        )
    return [
        ScheduledBucket(vector, span, schedules[i % len(schedules)], fragment=i * fragments // len(spans))
        for i, (vector, span) in enumerate(spans)
    ]


def fragments_of(buckets: Sequence[ScheduledBucket], count: int) -> list[list[Bucket]]:
    """Return the slices of vectors that make up each of `count` fragments, adjacent buckets joined."""
    fragments: list[list[Bucket]] = [[] for _ in range(count)]
    for bucket in buckets:
        parts = fragments[bucket.fragment]
        if parts and parts[-1].vector == bucket.vector:
            parts[-1] = Bucket(bucket.vector, slice(parts[-1].span.start, bucket.span.stop))
        else:
            parts.append(Bucket(bucket.vector, bucket.span))
    return fragments
