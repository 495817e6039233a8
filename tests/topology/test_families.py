"""The mixing matrices of every family: properties that all share, definitions, and which of them average exactly."""

import gc
import math
import weakref

import networkx as nx
import numpy as np
import pytest

from common.topology import NAMES, build
from tests.naming import case
from tests.topology.cases import FAMILIES, SIZES, cached, distance_from_average, is_power_of_two, product, sizes_of

DIRECTED = {"static_exponential", "one_peer_exponential"}
AT_MOST_ONE_PEER = {"one_peer_ring", "one_peer_exponential", "hypercube", "random_matching"}


@pytest.mark.parametrize("name", FAMILIES)
def test_rounds_are_doubly_stochastic_and_connected(name):
    for n in sizes_of(name):
        with case(name, n):
            topology = cached(name, n)
            union = np.zeros((n, n))
            for t, round_ in enumerate(topology.sample):
                W = topology.matrix(t)
                assert W.shape == (n, n)
                assert W.dtype == np.float64
                assert (W >= 0).all()
                np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
                np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
                if name not in DIRECTED:
                    np.testing.assert_array_equal(W, W.T)
                for i in range(n):
                    column, row = W[:, i].copy(), W[i].copy()
                    column[i] = row[i] = 0
                    assert round_.in_peers(i) == {j: row[j] for j in np.flatnonzero(row)}
                    assert round_.out_peers(i) == tuple(np.flatnonzero(column))
                    assert round_.self_weight(i) == W[i, i]
                union += W
            assert topology.doubly_stochastic
            assert topology.symmetric == (name not in DIRECTED or n <= 2 or (name == "static_exponential" and n == 3))
            assert nx.is_strongly_connected(nx.from_numpy_array(union, create_using=nx.DiGraph))


@pytest.mark.parametrize("name", FAMILIES)
def test_groups_are_those_of_the_matrix(name):
    for n in sizes_of(name):
        with case(name, n):
            for round_ in cached(name, n).sample[:8]:
                W = round_.matrix()
                averages = all(np.isclose(W[i, W[i] > 0], 1 / (W[i] > 0).sum()).all() for i in range(n))
                disjoint = all(((W[i] > 0) == (W[j] > 0)).all() for i, j in zip(*np.nonzero(W), strict=True))
                if averages and disjoint:
                    assert sorted(round_.groups) == sorted({tuple(np.flatnonzero(row)) for row in W})
                else:
                    assert round_.groups is None


@pytest.mark.parametrize("name", sorted(AT_MOST_ONE_PEER))
def test_one_peer_topologies_have_at_most_one(name):
    for n in sizes_of(name):
        with case(name, n):
            for round_ in cached(name, n).sample:
                assert all(len(round_.in_peers(i)) <= 1 and len(round_.out_peers(i)) <= 1 for i in range(n))


@pytest.mark.parametrize("name", NAMES)
def test_world_of_one_is_one_idle_round(name):
    topology = build(name, 1, **({"path": "nowhere"} if name == "file" else {}))
    assert topology.period == 1
    assert topology.round(0).is_idle
    assert topology.spectral_gap() == 1
    np.testing.assert_array_equal(topology.matrix(5), [[1.0]])


def test_ring_neighbours():
    for n in SIZES:
        with case(n):
            W = cached("ring", n).matrix(0)
            expected = np.zeros((n, n))
            for i in range(n):
                for j in {i, (i + 1) % n, (i - 1) % n}:
                    expected[i, j] = 1 / min(n, 3)
            np.testing.assert_allclose(W, expected)


def test_one_peer_ring_uses_every_edge_of_the_ring_equally_often():
    for n in SIZES[2:]:
        with case(n):
            topology = cached("one_peer_ring", n)
            assert topology.period == (n if n % 2 else 2)
            counts = sum(topology.matrix(t) > 0 for t in range(topology.period)).astype(int)
            ring = cached("ring", n).matrix(0) > 0
            np.fill_diagonal(counts, 0)
            np.fill_diagonal(ring, False)
            assert set(counts[ring]) == {(n - 1) // 2 if n % 2 else 1}
            assert not counts[~ring].any()
            idle = [[t for t, round_ in enumerate(topology.sample) if not round_.in_peers(i)] for i in range(n)]
            assert all(len(rounds) == n % 2 for rounds in idle)


def test_exponential_graphs_against_their_definition():
    for n in SIZES[1:]:
        with case(n):
            hops = math.ceil(math.log2(n))
            static = np.eye(n)
            one_peer = cached("one_peer_exponential", n)
            assert one_peer.period == hops
            for k in range(hops):
                shift = np.roll(np.eye(n), 2**k, axis=1)  # row i has its 1 in column i + 2^k
                np.testing.assert_array_equal(one_peer.matrix(k), (np.eye(n) + shift) / 2)
                static += shift
            np.testing.assert_allclose(cached("static_exponential", n).matrix(0), static / (hops + 1), atol=1e-15)


@pytest.mark.parametrize("n", [n for n in SIZES if is_power_of_two(n) and n > 1])
def test_hypercube_pairs_differ_in_one_bit_and_are_not_the_exponential_graph(n):
    cube, exponential = cached("hypercube", n), cached("one_peer_exponential", n)
    assert cube.period == exponential.period == int(math.log2(n))
    for t, round_ in enumerate(cube.sample):
        assert all(round_.in_peers(i) == {i ^ (1 << t): 0.5} for i in range(n))
    same = all(np.array_equal(cube.matrix(t), exponential.matrix(t)) for t in range(cube.period))
    assert same == (n == 2)


@pytest.mark.parametrize(
    ("n", "options", "rows", "cols"),
    [
        (12, {}, 3, 4),
        (16, {}, 4, 4),
        (16, {"rows": 2}, 2, 8),
        (16, {"cols": 2}, 8, 2),
        (6, {"rows": 6, "cols": 1}, 6, 1),
        (7, {}, 1, 7),
        (4, {}, 2, 2),
        (9, {}, 3, 3),
        (2, {}, 1, 2),
    ],
)
def test_torus_is_the_product_of_two_cycles(n, options, rows, cols):
    def cycle(length):  # nx.cycle_graph has a self-loop for 1
        return nx.cycle_graph(length) if length > 2 else nx.path_graph(length)

    graph = nx.convert_node_labels_to_integers(nx.cartesian_product(cycle(rows), cycle(cols)), ordering="sorted")
    adjacency = nx.to_numpy_array(graph, nodelist=range(n)) + np.eye(n)
    np.testing.assert_allclose(build("torus", n, **options).matrix(0), adjacency / adjacency.sum(axis=1))


@pytest.mark.parametrize(("n", "options", "rows", "cols"), [(12, {}, 3, 4), (8, {"rows": 4}, 4, 2), (7, {}, 1, 7)])
def test_grid_has_metropolis_hastings_weights(n, options, rows, cols):
    graph = nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, cols), ordering="sorted")
    expected = np.zeros((n, n))
    for i, j in graph.edges:
        expected[i, j] = expected[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    expected += np.diag(1 - expected.sum(axis=1))
    np.testing.assert_allclose(build("grid", n, **options).matrix(0), expected, atol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_star_has_metropolis_weights(n):
    expected = np.diag(np.full(n, 1 - 1 / n))
    expected[0, :] = expected[:, 0] = 1 / n
    np.testing.assert_allclose(cached("star", n).matrix(0), expected)


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_random_matching_depends_on_seed_and_time_only(n):
    topology, again, other = (build("random_matching", n, seed=seed) for seed in (3, 3, 4))
    assert topology.period is None
    forwards = [topology.round(t) for t in range(20)]
    backwards = [again.round(t) for t in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert n == 2 or forwards != [other.round(t) for t in range(20)]
    for round_ in forwards:
        idle = [i for i in range(n) if not round_.in_peers(i)]
        assert len(idle) == n % 2


def test_random_matching_draws_all_pairs_equally_often():
    n, draws = 5, 1000
    topology = build("random_matching", n)
    mean = sum(topology.matrix(t) for t in range(draws)) / draws
    expected = np.full((n, n), 0.5 / n) + np.eye(n) * (1 / n + 0.5 * (1 - 1 / n) - 0.5 / n)
    np.testing.assert_allclose(mean, expected, atol=0.03)


def test_random_matching_stream_is_pinned():
    # A run resumed elsewhere must draw the same pairs.
    assert build("random_matching", 6, seed=1).round(7).groups == ((0, 2), (1, 4), (3, 5))


def test_random_matching_keeps_the_rounds_of_a_few_steps_only():
    topology = build("random_matching", 8, seed=5)
    rounds = [weakref.ref(topology.round(t)) for t in range(200)]
    gc.collect()
    assert sum(round_() is not None for round_ in rounds) <= 16
    assert topology.round(199) is topology.round(199)


def test_workers_of_a_group_share_its_row():
    """Else a complete graph of n workers would take n^2 weights."""
    rows = build("complete", 8).round(0).weights
    assert len({id(row) for row in rows}) == 1


def ranks_of(host, workers_per_host):
    return set(range(host * workers_per_host, (host + 1) * workers_per_host))


def reference_rounds(hosts, workers_per_host):
    """Return the groups of each round, written from the text: one running counter over the pairs of hosts."""
    rounds = []
    counter = 0
    distance = 1
    while distance < hosts:
        first, second = set(), set()
        paired = set()
        for host in range(hosts):
            if host in paired:
                continue
            partner = host + distance
            paired |= {host, partner}
            alone = {frozenset(ranks_of(h, workers_per_host)) for h in (host, partner)}
            together = {frozenset(ranks_of(host, workers_per_host) | ranks_of(partner, workers_per_host))}
            first |= together if counter % 2 else alone
            second |= alone if counter % 2 else together
            counter += 1
        rounds += [first, second]
        distance *= 2
    return rounds


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_aer_follows_its_description_and_averages_in_one_cycle(hosts, workers):
    topology = build("aer", hosts * workers, workers)
    assert [set(map(frozenset, round_.groups)) for round_ in topology.sample] == reference_rounds(hosts, workers)
    assert topology.period == 2 * math.log2(hosts)
    assert distance_from_average(product(topology, 0, topology.period)) < 1e-14
    assert topology.spectral_gap() == 1
    assert topology.rounds_to_consensus() <= topology.period


@pytest.mark.parametrize("n", [2, 3, 8])
def test_aer_of_one_host_averages_completely(n):
    topology = build("aer", n, n)
    assert topology.period == 1
    assert topology.round(0) == build("complete", n).round(0)


@pytest.mark.parametrize(("n", "workers", "hosts"), [(3, 1, 3), (12, 2, 6), (20, 4, 5), (24, 2, 12)])
def test_aer_of_other_numbers_of_hosts_is_refused_with_advice(n, workers, hosts):
    with pytest.raises(ValueError, match=rf"power of two \(1, 2, 4, 8, \.\.\.\).*= {hosts}; .*base_k"):
        build("aer", n, workers)


@pytest.mark.parametrize("name", ["one_peer_exponential", "hypercube"])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_log2_rounds_from_any_start(name, n):
    topology = cached(name, n)
    hops = int(math.log2(n))
    for start in range(3 * hops):
        assert distance_from_average(product(topology, start, hops)) < 1e-14
        assert distance_from_average(product(topology, start, hops - 1)) > 1 / (2 * n)
    assert topology.rounds_to_consensus() == hops
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


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_base_2_of_a_power_of_two_is_the_hypercube(n):
    ours, cube = cached("base_k", n), cached("hypercube", n)
    assert [round_.groups for round_ in ours.sample] == [round_.groups for round_ in cube.sample]
