"""Spectral gap, contraction, and rounds to consensus against closed forms and plain numpy."""

import math

import numpy as np
import pytest

from common.topology import Round, Topology, build
from common.topology.topology import contraction
from tests.naming import case
from tests.topology.cases import FAMILIES, SIZES, cached, product, sizes_of

EXACT = 1e-9  # |lambda_2| of a period below this counts as an exact average


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "random_matching"])
def test_gap_is_that_of_the_second_largest_eigenvalue(name):
    for n in sizes_of(name):
        with case(name, n):
            topology = cached(name, n)
            p = topology.period
            moduli = np.sort(np.abs(np.linalg.eigvals(product(topology, 0, p))))[::-1]
            second = moduli[1] if n > 1 else 0.0
            expected = 1.0 if second < EXACT else 1 - second ** (1 / p)
            assert topology.spectral_gap() == pytest.approx(expected, abs=1e-9)
            assert 0 < topology.spectral_gap() <= 1


def test_gaps_in_closed_form():
    for n in SIZES[1:]:
        with case(n):
            hops = math.ceil(math.log2(n))
            assert cached("complete", n).spectral_gap() == 1
            assert cached("star", n).spectral_gap() == pytest.approx(1 / n if n > 2 else 1)
            if n > 3:
                rho = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n)) for k in range(1, n))
                assert cached("ring", n).spectral_gap() == pytest.approx(1 - rho)
                assert rho == pytest.approx(1 / 3 + 2 / 3 * math.cos(2 * math.pi / n))
            static = cached("static_exponential", n).spectral_gap()
            if n % 2 == 0:
                assert static == pytest.approx(2 / (1 + hops), abs=1e-12)
            else:
                assert static > 2 / (1 + hops) + 1e-6


@pytest.mark.parametrize(("n", "gap"), [(4, 0.667), (8, 0.146), (16, 0.131), (32, 0.034)])
def test_gaps_of_the_grid(n, gap):
    """Those of BlueFog's MeshGrid2DGraph."""
    assert cached("grid", n).spectral_gap() == pytest.approx(gap, abs=5e-4)


@pytest.mark.parametrize("n", [2, 3, 6, 9])
def test_random_gap_is_the_mean_square_contraction(n):
    topology = build("random_matching", n, seed=5)
    second_moment = sum(topology.matrix(t).T @ topology.matrix(t) for t in range(1000)) / 1000
    lambda_2 = np.sort(np.linalg.eigvalsh(second_moment - 1 / n))[-1]
    assert topology.spectral_gap() == pytest.approx(1 - math.sqrt(max(lambda_2, 0)), abs=0.02)


def test_gap_of_a_push_sum_round_removes_its_perron_vector():
    W = np.array([[0.5, 0.2, 0.0], [0.5, 0.5, 0.3], [0.0, 0.3, 0.7]])
    topology = Topology("mine", 3, schedule=(Round.from_matrix(W),))
    assert not topology.doubly_stochastic
    moduli = np.sort(np.abs(np.linalg.eigvals(W)))
    assert topology.spectral_gap() == pytest.approx(1 - moduli[1])


def test_the_gap_is_one_if_several_periods_average_exactly():
    """De Bruijn's graph of 16 workers does after 4, but not a graph with a small second eigenvalue."""
    de_bruijn = np.vstack([np.kron(np.eye(8), [[0.5, 0.5]])] * 2)
    for W, gap in ((de_bruijn, 1), (np.full((16, 16), 1 / 16) + 1e-4 * (np.eye(16) - 1 / 16), 1 - 1e-4)):
        assert Topology("mine", 16, schedule=(Round.from_matrix(W),)).spectral_gap() == pytest.approx(gap, abs=1e-12)


@pytest.mark.parametrize("W", [np.eye(4), np.kron(np.eye(2), np.full((2, 2), 0.5)), np.eye(4)[[1, 2, 3, 0]]])
def test_no_gap_without_consensus(W):
    topology = Topology("mine", 4, schedule=(Round.from_matrix(W),))
    assert topology.spectral_gap() == pytest.approx(0, abs=1e-12)
    assert topology.rounds_to_consensus(limit=50) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_contraction_is_the_second_singular_value(name):
    for n in {4, 7, 16} & set(sizes_of(name)):
        with case(name, n):
            topology = cached(name, n)
            for round_ in topology.sample[:6]:
                assert contraction(round_.matrix()) == pytest.approx(np.linalg.svd(round_.matrix())[1][1], abs=1e-12)
            P = product(topology, 0, len(topology.sample))
            assert contraction(P) == pytest.approx(np.linalg.svd(P)[1][1], abs=1e-12)


def test_contraction_of_push_sum_is_that_of_the_debiased_values():
    rng = np.random.default_rng(0)
    P = rng.random((5, 5)) + 0.1
    P /= P.sum(axis=0)
    x = rng.standard_normal((1000, 5))
    debiased = (x @ P.T) / (np.ones(5) @ P.T)
    ratios = np.linalg.norm(debiased - x.mean(1, keepdims=True), axis=1) / np.linalg.norm(x, axis=1)
    assert ratios.max() <= contraction(P)
    assert ratios.max() > 0.7 * contraction(P)


@pytest.mark.parametrize(("name", "n"), [("ring", 5), ("star", 4), ("one_peer_ring", 9), ("random_matching", 7)])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-10])
def test_rounds_to_consensus_is_the_first_such_round(name, n, tolerance):
    topology = cached(name, n)
    t = topology.rounds_to_consensus(tolerance)
    assert np.linalg.norm(product(topology, 0, t) - 1 / n, 2) <= tolerance
    assert np.linalg.norm(product(topology, 0, t - 1) - 1 / n, 2) > tolerance
    assert topology.rounds_to_consensus(tolerance, limit=t) == t
    assert topology.rounds_to_consensus(tolerance, limit=t - 1) is None
