"""Bytes and messages against independent counts."""

import numpy as np
import pytest

from common.topology import Round, Transport, build, bytes_leaving_hosts, bytes_sent, messages_sent, transport_of
from tests.naming import case
from tests.topology.cases import FAMILIES, cached, sizes_of

S = 1000.0


def leaving(round_, hosts, workers_per_host, transport=None):
    """Return the bytes that leave each of the hosts."""
    sent = bytes_leaving_hosts(round_, workers_per_host, S, transport)
    return [sent.get(host, 0) for host in range(hosts)]


@pytest.mark.parametrize("name", FAMILIES)
def test_transport_follows_the_structure(name):
    for n in sizes_of(name):
        with case(name, n):
            for round_ in cached(name, n).sample[:4]:
                W = round_.matrix()
                projection = np.allclose(W, W.T) and np.allclose(W @ W, W)  # averaging in groups, and nothing else
                largest = (W > 0).sum(axis=1).max()
                if largest == 1:
                    assert transport_of(round_) is Transport.IDLE
                elif projection and largest > 2:
                    assert transport_of(round_) is Transport.SUBGROUP
                else:
                    assert transport_of(round_) is Transport.SEND_RECV


@pytest.mark.parametrize("name", FAMILIES)
def test_total_bytes_by_counting_entries(name):
    for n in sizes_of(name):
        with case(name, n):
            for round_ in cached(name, n).sample[:4]:
                edges = np.count_nonzero(round_.matrix() - np.diag(np.diag(round_.matrix())))
                by_messages = [bytes_sent(round_, i, S, "send_recv") for i in range(n)]
                assert sum(by_messages) == edges * S
                assert sum(messages_sent(round_, i, "send_recv") for i in range(n)) == edges
                if transport_of(round_) is Transport.SUBGROUP:
                    sizes = (round_.matrix() > 0).sum(axis=1)
                    total = sum(bytes_sent(round_, i, S) for i in range(n))
                    assert total == pytest.approx((2 * (sizes - 1) / sizes).sum() * S)
                    assert [messages_sent(round_, i) for i in range(n)] == [2 * (g - 1) for g in sizes]
                else:
                    assert [bytes_sent(round_, i, S) for i in range(n)] == by_messages


@pytest.mark.parametrize("workers_per_host", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["one_peer_exponential", "static_exponential", "ring", "star"])
def test_bytes_leaving_a_host_by_blocks_of_the_matrix(name, workers_per_host):
    n = 10  # the last host may have fewer workers
    host_of = np.arange(n) // workers_per_host
    for round_ in cached(name, n).sample:
        W = round_.matrix()
        hosts = host_of[-1] + 1
        expected = [np.count_nonzero(W[np.ix_(host_of != host, host_of == host)]) * S for host in range(hosts)]
        assert leaving(round_, hosts, workers_per_host) == expected


def test_an_all_reduce_leaves_each_host_along_one_edge_of_its_ring():
    flat = cached("complete", 8).round(0)
    assert leaving(flat, 4, 2, "subgroup") == [2 * 7 / 8 * S] * 4
    assert leaving(flat, 1, 8) == [0]
    # Hosts 2 and 3 talk across in the first round, 0 and 1 average inside.
    round_ = build("aer", 8, 2).round(0)
    assert leaving(round_, 4, 2, "subgroup") == [0, 0, 1.5 * S, 1.5 * S]
    assert [bytes_sent(round_, worker, S, "subgroup") for worker in range(8)] == [S] * 4 + [1.5 * S] * 4
    interleaved = Round.from_groups([(0, 2, 4, 6)], 8)  # every edge of the ring leaves its host
    assert leaving(interleaved, 2, 4) == [1.5 * S] * 2


def test_hosts_that_average_inside_send_each_coordinate_once():
    aer = build("aer", 8, 2).round(0)
    assert transport_of(aer, 2) is Transport.HIERARCHICAL
    assert leaving(aer, 4, 2) == [0, 0, S, S]
    # Half of S to the other worker of the host and half back; workers of hosts 2 and 3 send their half across.
    assert [bytes_sent(aer, worker, S, None, 2) for worker in range(8)] == [S] * 4 + [1.5 * S] * 4
    assert [messages_sent(aer, worker, None, 2) for worker in range(8)] == [2] * 4 + [3] * 4
    complete = cached("complete", 8).round(0)
    assert transport_of(complete, 2) is Transport.HIERARCHICAL
    assert leaving(complete, 4, 2) == [2 * 3 / 4 * S] * 4
    assert transport_of(complete, 8) is Transport.SUBGROUP  # one host
    assert transport_of(complete, 3) is Transport.SUBGROUP  # the last host has fewer workers


HOSTS = {
    "pairs and singles": Round.from_groups([(0, 2), (1,)], 3),
    "directed": cached("one_peer_exponential", 3).round(0),
    "own weight": Round(({0: 0.5, 1: 0.25, 2: 0.25}, {0: 0.25, 1: 0.75}, {0: 0.25, 2: 0.75})),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HOSTS)
def test_the_round_of_the_hosts_by_kronecker_product(name, size):
    hosts = HOSTS[name]
    W = np.kron(hosts.matrix(), np.full((size, size), 1 / size))
    round_ = Round.from_matrix(W)
    np.testing.assert_allclose(round_.between_hosts(size).matrix(), hosts.matrix(), rtol=1e-12)
    assert transport_of(round_, size) is Transport.HIERARCHICAL
    assert leaving(round_, 3, size) == [len(hosts.out_peers(host)) * S for host in range(3)]
    W[0, 0], W[0, 1], W[1, 0], W[1, 1] = W[0, 0] + 0.01, W[0, 1] - 0.01, W[1, 0] - 0.01, W[1, 1] + 0.01
    assert Round.from_matrix(W).between_hosts(size) is None


def test_idle_costs_nothing():
    idle = Round.idle(3)
    for transport in (None, *Transport):  # whichever is asked for
        assert bytes_sent(idle, 1, S, transport) == messages_sent(idle, 1, transport) == 0
        assert bytes_leaving_hosts(idle, 1, S, transport) == {}


@pytest.mark.parametrize("transport", ["subgroup", Transport.SUBGROUP])
def test_a_pair_sends_as_much_by_either_transport(transport):
    pair = Round.from_groups([(0, 1)], 3)
    assert [bytes_sent(pair, i, S, transport) for i in range(3)] == [S, S, 0]
    assert [bytes_sent(pair, i, S) for i in range(3)] == [S, S, 0]
    assert messages_sent(pair, 0, transport) == 2


def test_impossible_transports_are_refused():
    directed = cached("one_peer_exponential", 5).round(0)
    with pytest.raises(ValueError, match="expected a round of disjoint groups"):
        bytes_sent(directed, 0, S, "subgroup")
    with pytest.raises(ValueError, match="expected send_recv, subgroup or hierarchical for a round"):
        messages_sent(directed, 0, "idle")
    with pytest.raises(ValueError, match="expected a round in which hosts of 2 > 1 workers average inside"):
        bytes_leaving_hosts(directed, 2, S, "hierarchical")
    with pytest.raises(ValueError, match="carrier_pigeon"):
        bytes_leaving_hosts(directed, 1, S, "carrier_pigeon")
