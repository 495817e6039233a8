"""Which topologies average exactly in finite time, and which do not."""

import math

import numpy as np
import pytest

from common.topology import build, period_contraction, rounds_to_consensus
from tests.naming import case
from tests.topology.cases import SIZES, cached, distance_from_average, product

POWERS_OF_TWO = [2, 4, 8, 16, 32]


@pytest.mark.parametrize("name", ["one_peer_exponential", "hypercube"])
@pytest.mark.parametrize("n", POWERS_OF_TWO)
def test_log2_rounds_from_any_start(name, n):
    topology = cached(name, n)
    hops = int(math.log2(n))
    for start in range(3 * hops):
        assert distance_from_average(product(topology, start, hops)) < 1e-14
        assert distance_from_average(product(topology, start, hops - 1)) > 1 / (2 * n)
    assert rounds_to_consensus(topology) == hops
    assert topology.spectral_gap() == 1


@pytest.mark.parametrize(("n", "largest"), [(3, None), (5, None), (6, 0.083), (12, 0.042)])
def test_one_peer_exponential_does_not_average_other_sizes(n, largest):
    topology = cached("one_peer_exponential", n)
    error = distance_from_average(product(topology, 0, topology.period))
    assert error > 0.01
    if largest:
        assert error == pytest.approx(largest, abs=5e-4)
    assert topology.spectral_gap() < 0.99


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_base_k_averages_exactly_for_every_size_with_at_most_k_peers(k):
    for n in SIZES:
        with case(n):
            topology = cached("base_k", n, k=k)
            assert distance_from_average(product(topology, 0, topology.period)) < 1e-14
            assert topology.spectral_gap() == 1
            assert topology.symmetric
            assert topology.doubly_stochastic
            assert all(len(round_.in_peers(i)) <= k for round_ in topology.sample for i in range(n))
            # Theorem 1 of the paper; a world of one still has a round.
            assert topology.period <= max(1, 2 * math.log(n, k + 1) + 2 + 1e-9)


@pytest.mark.parametrize(
    ("n", "k", "period"),
    # Figures of the paper for n = 5, 6 with k = 1; powers of k + 1 are hyper-hypercubes.
    [(5, 1, 5), (6, 1, 4), (8, 1, 3), (16, 1, 4), (9, 2, 2), (27, 2, 3), (16, 3, 2), (12, 3, 2), (3, 2, 1)],
)
def test_base_k_lengths(n, k, period):
    assert cached("base_k", n, k=k).period == period


@pytest.mark.parametrize("n", POWERS_OF_TWO)
def test_base_2_of_a_power_of_two_is_the_hypercube(n):
    ours, cube = cached("base_k", n), cached("hypercube", n)
    assert [round_.groups for round_ in ours.sample] == [round_.groups for round_ in cube.sample]


def test_complete_averages_in_one_round():
    for n in SIZES:
        with case(n):
            topology = cached("complete", n)
            np.testing.assert_allclose(topology.matrix(0), np.full((n, n), 1 / n))
            assert rounds_to_consensus(topology) == (n > 1)
            assert period_contraction(topology) < 1e-14


@pytest.mark.parametrize("workers_per_host", [1, 2, 4])
@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_aer_averages_in_one_cycle(hosts, workers_per_host):
    topology = build("aer", hosts * workers_per_host, workers_per_host)
    assert topology.period == 2 * math.log2(hosts)
    assert distance_from_average(product(topology, 0, topology.period)) < 1e-14
    assert topology.spectral_gap() == 1
    assert rounds_to_consensus(topology) <= topology.period
