"""scripts.benchmarks.utilisation: what it predicts is that of closed forms, where there are any."""

from dataclasses import replace

import pytest

from common.options import LocalSteps
from common.planner import Cluster
from scripts.benchmarks.utilisation import needed, utilisation

HOSTS, PAYLOAD_MB, COMPUTE_MS = 4, 400.0, 100.0
CLUSTER = Cluster(HOSTS, payload_mb=PAYLOAD_MB, compute_ms=COMPUTE_MS, latency_us=0.0)


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 20])
def test_averaging_that_waits_needs_what_a_ring_takes(steps: int, share: float) -> None:
    waits_ms = steps * COMPUTE_MS * (1 / share - 1)
    rate = 8 * 2 * (HOSTS - 1) / HOSTS * PAYLOAD_MB / waits_ms
    local = LocalSteps(steps, merge_after=0)
    assert utilisation(replace(CLUSTER, inter_gbps=rate), "complete", local) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_gossip_that_overlaps_needs_a_message_in_a_step(share: float) -> None:
    rate = 8 * PAYLOAD_MB / (COMPUTE_MS / share)
    assert utilisation(replace(CLUSTER, inter_gbps=rate), "one_peer_exponential", None) == pytest.approx(
        share, rel=0.02
    )


def test_allreduce_takes_its_best_number_of_buckets() -> None:
    slow = Cluster(HOSTS, payload_mb=PAYLOAD_MB, compute_ms=COMPUTE_MS, latency_us=1000.0, inter_gbps=1e4)
    # Two buckets of 6 hops each, the first of them behind the backward pass.
    assert utilisation(slow, "complete", None) == pytest.approx(COMPUTE_MS / (COMPUTE_MS + 6), rel=0.01)


def test_a_share_that_is_not_kept_needs_more_than_any_rate() -> None:
    assert needed([0.2, 0.9, 0.4] + [0.6] * 317 + [0.4], 0.5) is None
    assert needed([0.9] * 321, 0.5) == pytest.approx(1e-3)
    assert needed([0.9, 0.4, *[0.6] * 319], 0.5) == pytest.approx(1e-3 * 10 ** (8 / 320 * 1.5))
