"""Closed forms against the definitions they stand for."""

import numpy as np
import pytest

from common.runtime import formulas


def test_published_costs_of_a_round() -> None:
    """arXiv 2110.13363, 16 nodes, 100 MB at 8 Gbit/s (100 ms), 500 us."""
    numbers = {"megabytes": 100.0, "gbps": 8.0, "latency_us": 500.0}
    assert formulas.one_peer_ms(**numbers) == pytest.approx(100.5)
    assert formulas.static_exponential_ms(16, **numbers) == pytest.approx(402.0)
    assert formulas.ring_allreduce_ms(16, **numbers) == pytest.approx(216.0)
    assert formulas.parameter_server_ms(16, **numbers) == pytest.approx(1600.5)


def test_slowest_of_many() -> None:
    random = np.random.default_rng(0).lognormal(-0.02, 0.2, (200_000, 8)) * 10
    assert formulas.slowest_ms(10.0, 0.2, 8) == pytest.approx(random.max(axis=1).mean(), rel=2e-3)
    assert formulas.slowest_ms(10.0, 0.2, 1) == formulas.slowest_ms(10.0, 0.0, 8) == 10.0


def test_allreduce_hides_all_but_its_last_bucket_behind_a_slow_backward() -> None:
    assert formulas.allreduce_step_ms(60.0, 1.0, 4, update_ms=2.0) == pytest.approx(63.0)
    # On a slow network: forward, the first bucket's backward, and all of the messages.
    assert formulas.allreduce_step_ms(60.0, 100.0, 4) == pytest.approx(20.0 + 10.0 + 400.0)
