"""scripts.benchmarks.utilisation: the rates that it finds are those of closed forms, where there are any."""

import pytest

from common.options import LocalSteps
from common.planner import Cluster
from scripts.benchmarks.utilisation import SHARES, needed, rates, utilisation

HOSTS, PAYLOAD_MB, COMPUTE_MS = 4, 400.0, 100.0
CLUSTER = Cluster(HOSTS, payload_mb=PAYLOAD_MB, compute_ms=COMPUTE_MS, latency_us=0.0)


@pytest.mark.parametrize("steps", [1, 20])
def test_averaging_that_waits_needs_what_a_ring_takes(steps: int) -> None:
    found = rates(CLUSTER, "complete", LocalSteps(steps, merge_after=0))
    for share in SHARES:
        waits_ms = steps * COMPUTE_MS * (100 / share - 1)
        assert found[f"gbps_{share}"] == pytest.approx(8 * 2 * (HOSTS - 1) / HOSTS * PAYLOAD_MB / waits_ms, rel=0.03)


def test_gossip_that_overlaps_needs_a_message_in_a_step() -> None:
    found = rates(CLUSTER, "one_peer_exponential", None)
    for share in SHARES:
        assert found[f"gbps_{share}"] == pytest.approx(8 * PAYLOAD_MB / (COMPUTE_MS * 100 / share), rel=0.03)


def test_allreduce_takes_its_best_number_of_buckets() -> None:
    slow = Cluster(HOSTS, payload_mb=PAYLOAD_MB, compute_ms=COMPUTE_MS, latency_us=1000.0, inter_gbps=1e4)
    # Two buckets of 6 hops each, the first of them behind the backward pass.
    assert utilisation(slow, "complete", None) == pytest.approx(COMPUTE_MS / (COMPUTE_MS + 6), rel=0.01)


def test_a_share_that_is_not_kept_needs_more_than_any_rate() -> None:
    assert needed([0.2, 0.9, 0.4] + [0.6] * 317 + [0.4], 0.5) is None
    assert needed([0.9] * 321, 0.5) == pytest.approx(1e-3)
    assert needed([0.9, 0.4, *[0.6] * 319], 0.5) == pytest.approx(1e-3 * 10 ** (8 / 320 * 1.5))
