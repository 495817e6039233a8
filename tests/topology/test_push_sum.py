"""Push-sum's weights and rounds against matrix products."""

import copy
import pickle
import sys

import numpy as np
import pytest

from common.topology import Round, Topology, Transport, build, push_sum, transport_of, weights_of
from common.topology.push_sum import DebiasedRound, mixed


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
    monkeypatch.setattr(
        sys.modules[mixed.__module__], "mixed", lambda *arguments: mixings.append(arguments) or mixed(*arguments)
    )
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
