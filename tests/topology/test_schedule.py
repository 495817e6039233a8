"""Schedules made of others: idle rounds, between hosts, staggered phases, and push-sum against matrix products."""

import copy
import pickle

import numpy as np
import pytest

from common.topology import (
    Round,
    Topology,
    Transport,
    build,
    bytes_leaving_hosts,
    in_phases,
    push_sum,
    schedule,
    transport_of,
    weights_of,
)
from common.topology.schedule import DebiasedRound, mixed
from tests.topology.cases import product


@pytest.mark.parametrize("name", ["one_peer_exponential", "random_matching", "base_k"])
@pytest.mark.parametrize("k", [1, 3])
def test_idle_rounds_follow_each_round(name, k):
    plain, spaced = build(name, 6), build(name, 6, idle_rounds=k)
    assert spaced.options["idle_rounds"] == k
    assert spaced.period == (plain.period and plain.period * (1 + k))
    for t in range(20):
        expected = plain.matrix(t // (1 + k)) if t % (1 + k) == 0 else np.eye(6)
        np.testing.assert_array_equal(spaced.matrix(t), expected)
    assert 1 - spaced.spectral_gap() == pytest.approx((1 - plain.spectral_gap()) ** (1 / (1 + k)), abs=1e-12)
    np.testing.assert_allclose(product(spaced, 0, 6 * (1 + k)), product(plain, 0, 6), atol=1e-15)


@pytest.mark.parametrize("name", ["one_peer_exponential", "ring", "random_matching", "complete"])
def test_between_hosts_is_the_kronecker_product(name):
    topology = build(name, 12, 3, between_hosts=True)
    hosts = build(name, 4)
    assert topology.options["between_hosts"] is True
    for t in range(5):
        expected = np.kron(hosts.matrix(t), np.full((3, 3), 1 / 3))
        np.testing.assert_allclose(topology.matrix(t), expected, rtol=1e-12)
        np.testing.assert_allclose(topology.round(t).between_hosts(3).matrix(), hosts.matrix(t), rtol=1e-12)
    assert topology.spectral_gap() == pytest.approx(hosts.spectral_gap())


def test_between_hosts_goes_with_idle_rounds_and_one_host():
    topology = build("ring", 4, 2, between_hosts=True, idle_rounds=1)
    assert [topology.round(t).is_idle for t in range(4)] == [False, True] * 2
    np.testing.assert_array_equal(build("ring", 4, 4, between_hosts=True).matrix(0), np.full((4, 4), 0.25))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 6, 4, True), "between_hosts: expected hosts of one size, got world_size=6, workers_per_host=4"),
        (("aer", 8, 2, True), "'aer': between_hosts: expected False, this topology knows hosts by itself"),
        (("ring", 8, 2, "yes"), "between_hosts: expected true or false, got 'yes'"),
    ],
)
def test_between_hosts_is_checked(arguments, message):
    name, n, workers_per_host, value = arguments
    with pytest.raises(ValueError, match=message):
        build(name, n, workers_per_host, between_hosts=value)


@pytest.mark.parametrize("workers_per_host", [1, 2, 4])
@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_every_host_talks_across_once_in_each_step_of_staggered_aer(hosts, workers_per_host):
    topology = build("aer", hosts * workers_per_host, workers_per_host)
    aligned, staggered = in_phases(topology, "staggered")
    assert aligned is topology
    for t in range(topology.period):
        for host in range(hosts):
            sent = [
                bytes_leaving_hosts(phase.round(t), workers_per_host, 0.5).get(host, 0)
                for phase in (aligned, staggered)
            ]
            assert sorted(sent) == [0, 0.5], (t, host)  # half of the parameters each, one of them at a time
    np.testing.assert_allclose(product(staggered, 0, topology.period), 1 / topology.world_size, atol=1e-12)


@pytest.mark.parametrize("name", ["one_peer_exponential", "ring", "complete"])
def test_a_period_mixes_as_before(name):
    topology = build(name, 6)
    _, staggered = in_phases(topology, "staggered")
    assert staggered.period == topology.period
    assert staggered.fingerprint() != topology.fingerprint()  # all workers must agree on it
    np.testing.assert_allclose(
        product(staggered, 0, staggered.period), product(topology, 0, topology.period), atol=1e-12
    )


def test_two_rounds_that_do_not_commute_take_turns_one_step_later():
    topology = build("one_peer_ring", 8)
    assert topology.period == 2
    _, staggered = in_phases(topology, "staggered")
    for t in range(4):
        np.testing.assert_array_equal(staggered.matrix(t), topology.matrix(t + 1))


def test_what_cannot_be_staggered_is_refused():
    with pytest.raises(ValueError, match=r"phases='staggered': topology 'random_matching' has no period"):
        in_phases(build("random_matching", 4), "staggered")
    pairs = [Round.from_groups([pair], 4) for pair in ((0, 1), (1, 2), (2, 3))]
    path = Topology("path", 4, schedule=tuple(pairs))
    with pytest.raises(ValueError, match="rounds 0 and 1 of topology 'path' do not commute"):
        in_phases(path, "staggered")
    with pytest.raises(ValueError, match="phases='diagonal': expected one of aligned, staggered"):
        in_phases(path, "diagonal")


def directed(n: int = 5, period: int = 2) -> Topology:
    rng = np.random.default_rng(0)
    matrices = [np.eye(n) + (rng.random((n, n)) < 0.5) * rng.random((n, n)) for _ in range(period)]
    return Topology("directed", n, schedule=tuple(Round.from_matrix(W / W.sum(axis=0)) for W in matrices))


def test_rounds_of_z_are_those_of_x_over_w():
    topology = directed()
    z, n = push_sum(topology), topology.world_size
    X, w = np.random.default_rng(1).normal(size=(n, 3)), np.ones(n)
    Z = X.copy()
    for t in range(40):
        np.testing.assert_allclose(weights_of(z, t), w, rtol=1e-12)
        Z = z.matrix(t) @ Z
        X, w = topology.matrix(t) @ X, topology.matrix(t) @ w
        np.testing.assert_allclose(Z, X / w[:, None], rtol=1e-10)
    assert w.sum() == pytest.approx(n)
    np.testing.assert_allclose(weights_of(z, 3), np.linalg.multi_dot([topology.matrix(t) for t in (2, 1, 0)]).sum(1))
    # Consensus on the mean of the start, which is not the mean of where z is.
    np.testing.assert_allclose(Z, np.tile(np.random.default_rng(1).normal(size=(n, 3)).mean(0), (n, 1)), atol=1e-6)


def test_a_run_mixes_the_weights_once_for_each_step(monkeypatch):
    """Simulated and real workers ask in each step for the round and for w before and after it, from many places."""
    z, mixings = push_sum(directed()), []
    monkeypatch.setattr(schedule, "mixed", lambda *arguments: mixings.append(arguments) or mixed(*arguments))
    for t in range(200):
        for clock in (t, t + 1, t):
            z.round(clock)
            weights_of(z, clock)
    assert len(mixings) == 201
    assert np.array_equal(weights_of(z, 3), weights_of(push_sum(directed()), 3))


def test_topologies_that_keep_the_mean_stay_as_they_are():
    topology = build("one_peer_exponential", 6)
    assert push_sum(topology) is topology
    np.testing.assert_array_equal(weights_of(topology, 7), np.ones(6))


def test_a_round_of_z_is_checked_copied_and_pickled():
    round_ = push_sum(directed()).round(3)
    assert not round_.doubly_stochastic
    for copied in (copy.deepcopy(round_), pickle.loads(pickle.dumps(round_))):
        assert isinstance(copied, DebiasedRound)
        assert copied == round_
    with pytest.raises(ValueError, match=r"row 1: expected a sum of 1, got 0\.9"):
        DebiasedRound(({0: 1.0}, {1: 0.9}))


def test_hosts_that_average_inside_stay_hosts_under_push_sum(tmp_path):
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 0\n0 2\n")
    options = {"path": edges, "directed": True, "weights": "push_sum"}
    hosts, z = build("file", 3, **options), push_sum(build("file", 6, 2, between_hosts=True, **options))
    for t in range(4):
        between = z.round(t).between_hosts(2)
        assert isinstance(between, DebiasedRound)
        np.testing.assert_allclose(between.matrix(), push_sum(hosts).matrix(t), rtol=1e-12)
        np.testing.assert_allclose(np.kron(between.matrix(), np.full((2, 2), 0.5)), z.matrix(t), rtol=1e-12)
        assert transport_of(z.round(t), 2) is Transport.HIERARCHICAL
