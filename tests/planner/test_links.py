"""Queues and rounds against arithmetic by hand and a message-by-message replay."""

import numpy as np
import pytest

from common.planner.links import allreduce_ms, queue, serve
from tests.planner.clusters import cluster


def test_ring_allreduce_is_the_published_formula() -> None:
    """arXiv 2110.13363: 2 M/B + 2 n L, the bandwidth term exactly 2 (n-1)/n."""
    assert allreduce_ms(cluster(), 100.0) == pytest.approx(2 * 3 / 4 * 80.0)
    assert allreduce_ms(cluster(latency_us=100.0), 100.0) == pytest.approx(120.0 + 6 * 0.1)
    assert allreduce_ms(cluster(hosts=1), 100.0) == 0
    inside = cluster(hosts=1, workers_per_host=4, intra_gbps=100.0)
    assert allreduce_ms(inside, 100.0) == pytest.approx(2 * 3 / 4 * 8.0)
    assert allreduce_ms(cluster(slow_links={2: 4.0}), 100.0) == pytest.approx(4 * 120.0)


def test_a_queue_works_on_one_message_at_a_time() -> None:
    ready = np.array([[0.0, 5.0], [1.0, 20.0], [9.0, 21.0]])
    assert queue(ready, np.array([4.0, 2.0])).T.tolist() == [[4, 8, 13], [7, 22, 24]]


def test_edges_that_share_a_queue_take_turns() -> None:
    start, end, _ = serve(np.zeros((2, 3)), np.array([2.0, 2.0, 3.0]), np.array([0, 0, 1]))
    assert start.tolist() == [[0, 2, 0], [4, 6, 3]]
    assert end.tolist() == [[2, 4, 3], [6, 8, 6]]


def test_a_message_waits_for_what_an_earlier_step_left_in_its_queue() -> None:
    node, duration = np.array([0, 0]), np.array([10.0, 10.0])
    _, _, left = serve(np.array([[0.0, 1.0]]), duration, node)  # over at 10 and 20
    start, _, _ = serve(np.array([[12.0, 30.0]]), duration, node, left[left["end"] > 11.0])
    assert start.tolist() == [[20, 30]]


@pytest.mark.parametrize("seed", range(5))
def test_queues_replayed_message_by_message(seed: int) -> None:
    random = np.random.default_rng(seed)
    node, duration = random.integers(0, 4, 9), random.uniform(1, 5, 9)
    ready = np.cumsum(random.uniform(0, 4, (6, 9)), axis=0)
    start, end, _ = serve(ready, duration, node)
    alone = queue(ready, duration) - duration
    for one in range(4):
        free = 0.0
        edges = np.flatnonzero(node == one)
        for turn, b, e in sorted((alone[b, e], b, e) for b in range(6) for e in edges):
            assert turn > ready[b, e] - 1e-9
            assert start[b, e] == pytest.approx(max(free, ready[b, e]))
            free = start[b, e] + duration[e]
            assert end[b, e] == pytest.approx(free)
