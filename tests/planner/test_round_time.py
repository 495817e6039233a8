"""Arrival times of messages, computed by hand; bytes against common.topology.cost."""

import numpy as np
import pytest

from common.planner.links import mb_ms
from common.planner.round_time import Busy, complete, round_time
from common.topology import Round, build
from common.topology.cost import Transport, bytes_leaving_hosts
from tests.planner.clusters import cluster


def arrivals(c, round_, flat=False, launched=None) -> np.ndarray:
    """Return when workers are done, [buckets, workers], after launching all buckets at the same time."""
    launched = np.zeros((c.gossip_buckets, c.workers)) if launched is None else launched
    return round_time(c, round_, flat=flat)(launched, Busy.nothing(c.workers))


def test_a_one_peer_round_is_one_message() -> None:
    """arXiv 2110.13363: M/B + L."""
    done = arrivals(cluster(latency_us=500.0), build("one_peer_exponential", 4).round(0))
    assert done[-1] == pytest.approx([80.5] * 4)


def test_two_hosts_two_buckets_by_hand() -> None:
    """8 MB a bucket: 8 ms over the link; worker 1 launches 3 ms later."""
    c = cluster(hosts=2, payload_mb=16.0, gossip_bucket_mb=8.0, inter_gbps=8.0)
    launched = np.array([[0.0, 3.0], [1.0, 30.0]])
    done = arrivals(c, build("complete", 2).round(0), launched=launched)
    assert done.tolist() == [[11, 11], [38, 38]]


def test_hierarchical_by_hand() -> None:
    """Two hosts of two, two buckets of 8 MB: 4 ms to scatter, 8 ms across, 4 ms to gather."""
    c = cluster(hosts=2, workers_per_host=2, payload_mb=16.0, gossip_bucket_mb=8.0, inter_gbps=8.0, intra_gbps=8.0)
    done = arrivals(c, build("complete", 4).round(0))
    assert done.T.tolist() == [[16, 24]] * 4


def test_flat_messages_of_a_host_share_its_link() -> None:
    two = cluster(hosts=2, workers_per_host=2, intra_gbps=1000.0, gossip_bucket_mb=1.0)
    exponential = build("one_peer_exponential", 4, 2)
    assert arrivals(two, exponential.round(1))[-1] == pytest.approx([160.0] * 4, rel=0.02)  # both workers send across
    assert arrivals(two, exponential.round(0))[-1] == pytest.approx([80.0] * 4)  # 1 -> 2, 3 -> 0


def test_many_to_one_is_limited_by_the_receiver() -> None:
    c = cluster(gossip_bucket_mb=100.0)
    weights = ({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, {0: 0.25, 1: 0.75}, {0: 0.25, 2: 0.75}, {0: 0.25, 3: 0.75})
    assert arrivals(c, Round(weights))[0].max() == pytest.approx(3 * 80.0)


def test_rounds_of_aer_occupy_only_the_links_of_those_who_talk_across() -> None:
    c = cluster(workers_per_host=2, gossip_bucket_mb=100.0)
    flat, hierarchical = (arrivals(c, build("aer", 8, 2).round(0), flat)[-1] for flat in (True, False))
    assert sorted(set(np.round(flat, 6))) == pytest.approx([4.0, 2 * 3 / 4 * 80.0])  # 2 (g-1)/g S, g = 2 and 4
    assert sorted(set(np.round(hierarchical, 6))) == pytest.approx([4.0, 2.0 + 80.0 + 2.0])


@pytest.mark.parametrize(("name", "L"), [("aer", 1), ("aer", 2), ("ring", 1), ("one_peer_exponential", 2), ("star", 1)])
def test_a_link_is_occupied_for_the_bytes_that_leave_its_host(name: str, L: int) -> None:
    c = cluster(hosts=8, workers_per_host=L, intra_gbps=1e9, gossip_bucket_mb=100.0)
    for round_ in build(name, 8 * L, L).sample:
        leaving = bytes_leaving_hosts(round_, L, c.payload_mb)
        most = max(leaving.values(), default=0.0)
        assert arrivals(c, round_, flat=True).max() >= mb_ms(most, c.inter_gbps) - 1e-3


def test_averaging_all_hosts_along_rails() -> None:
    """2 (H-1)/H S leave a host; latency 2 (H-1) times for each of two pipelined buckets."""
    c = cluster(workers_per_host=2, gossip_bucket_mb=50.0, intra_gbps=1e9, latency_us=1000.0)
    assert arrivals(c, build("complete", 8).round(0)).max() == pytest.approx(2 * 3 / 4 * 80.0 + 6.0, rel=1e-5)


@pytest.mark.parametrize(("hosts", "L"), [(1, 1), (1, 4), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("flat", [False, True])
def test_complete_without_its_matrix(hosts: int, L: int, flat: bool) -> None:
    c = cluster(hosts=hosts, workers_per_host=L, latency_us=100.0, intra_latency_us=10.0)
    launched = np.random.default_rng(0).uniform(0, 30, (c.gossip_buckets, c.workers)).cumsum(axis=0)
    expected = round_time(c, build("complete", hosts * L).round(0), flat=flat)(launched, Busy.nothing(c.workers))
    assert complete(c, flat=flat)(launched, Busy.nothing(c.workers)) == pytest.approx(expected)


def test_nothing_travels_in_an_idle_round() -> None:
    assert not arrivals(cluster(), Round.idle(4)).any()


def test_all_reduce_in_a_group_costs_what_the_table_of_costs_says() -> None:
    c = cluster(hosts=3, workers_per_host=2, gossip_bucket_mb=100.0, intra_gbps=1e9)
    leaving = bytes_leaving_hosts(build("complete", 6).round(0), 2, 100.0, Transport.SUBGROUP)
    assert arrivals(c, build("complete", 6).round(0), flat=True).max() == pytest.approx(mb_ms(leaving[0], 10.0))
