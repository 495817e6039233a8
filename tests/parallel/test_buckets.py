"""Sizes of buckets: that of a message, times the messages into which an all-reduce cuts them."""

import pytest
import torch

from common.parallel.gossip.buckets import bucket_bytes, plan_buckets
from common.topology import Round, Topology, allreduce_messages, build

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "workers", "workers_per_host", "bucket_mb", "expected_mb"),
    [
        ("one_peer_exponential", 8, 1, 2.0, 2.0),
        ("ring", 8, 1, 2.0, 2.0),
        ("random_matching", 8, 1, 2.0, 2.0),
        ("complete", 1, 1, 2.0, 2.0),
        ("complete", 2, 1, 2.0, 2.0),  # a pair sends its parameters whole
        ("complete", 8, 1, 2.0, 16.0),
        ("complete", 8, 2, 2.0, 16.0),  # 2 parts inside of a host, of 4 messages between hosts
        ("complete", 4, 2, 2.0, 2.0),  # two hosts are a pair
        ("complete", 32, 1, 2.0, 25.0),
        ("complete", 8, 1, 40.0, 40.0),
        ("aer", 8, 2, 2.0, 2.0),
    ],
)
def test_bucket_bytes(name: str, workers: int, workers_per_host: int, bucket_mb: float, expected_mb: float) -> None:
    topology = build(name, workers, workers_per_host)
    assert bucket_bytes(topology, bucket_mb) == expected_mb * MIB
    numel = round(60 * MIB / 4)
    buckets = plan_buckets([torch.empty(numel)], topology, bucket_mb, "aligned")
    assert sum(bucket.span.stop - bucket.span.start for bucket in buckets) == numel
    assert all((bucket.span.stop - bucket.span.start) * 4 <= expected_mb * MIB + 64 for bucket in buckets)


def test_the_round_with_the_largest_messages_decides() -> None:
    groups = Round.from_groups([(0, 1, 2), (3, 4, 5, 6)], 7)
    assert allreduce_messages(groups) == 3
    pairs = Round.from_groups([(0, 1), (2, 3)], 7)
    assert bucket_bytes(Topology("groups", 7, schedule=(groups,)), 2.0) == 6 * MIB
    assert bucket_bytes(Topology("both", 7, schedule=(groups, pairs)), 2.0) == 2 * MIB
