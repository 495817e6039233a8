"""Topologies read from an edge-list file."""

import networkx as nx
import numpy as np
import pytest

from common.topology import build


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "graph.txt"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def graph():
    return nx.connected_watts_strogatz_graph(12, 4, 0.4, seed=2)


def as_lines(graph):
    return "".join(f"{i} {j}\n" for i, j in graph.edges)


def test_metropolis_weights(write, graph):
    topology = build("file", 12, path=write("# a graph\n\n" + as_lines(graph)))
    expected = np.zeros((12, 12))
    for i, j in graph.edges:
        expected[i, j] = expected[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    expected += np.diag(1 - expected.sum(axis=1))
    np.testing.assert_allclose(topology.matrix(0), expected)
    assert topology.symmetric
    assert topology.doubly_stochastic
    assert topology.period == 1


def test_push_sum_weights_of_a_directed_graph(write):
    topology = build("file", 4, path=write("0 1\n1 2\n2 3 # back\n3 0\n0 2\n"), directed=True, weights="push_sum")
    W = topology.matrix(0)
    third = 1 / 3
    expected = [[third, 0, 0, 0.5], [third, 0.5, 0, 0], [third, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    np.testing.assert_allclose(W, expected)
    np.testing.assert_allclose(W.sum(axis=0), 1)
    assert not topology.doubly_stochastic
    assert 0 < topology.spectral_gap() < 1


def test_push_sum_weights_of_an_undirected_graph(write, graph):
    W = build("file", 12, path=write(as_lines(graph)), weights="push_sum").matrix(0)
    adjacency = nx.to_numpy_array(graph, nodelist=range(12)) + np.eye(12)
    np.testing.assert_allclose(W, adjacency / adjacency.sum(axis=0))


def test_explicit_weights(write):
    W = build("file", 3, path=write("0 1 0.5\n1 2 0.25\n"), weights="explicit").matrix(0)
    np.testing.assert_array_equal(W, [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]])
    cycle = write("0 1 1.0\n1 2 1.0\n2 0 1.0\n")
    W = build("file", 3, path=cycle, weights="explicit", directed=True).matrix(0)
    np.testing.assert_array_equal(W, np.eye(3)[[2, 0, 1]])  # 1 takes from 0, 2 from 1, 0 from 2


def test_fingerprint_is_of_the_contents_not_the_path(tmp_path):
    first, second, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    first.write_text("0 1\n1 2\n")
    second.write_text("# same graph\n1 2\n0 1\n")
    other.write_text("0 1\n0 2\n")
    prints = [build("file", 3, path=path).fingerprint() for path in (first, second, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("0 1\n1 4\n", {}, r"graph\.txt:2: expected workers 0\.\.3 \(world_size=4\), got 4"),
        ("-1 1\n", {}, r":1: expected workers 0\.\.3 \(world_size=4\), got -1"),
        ("0 1\n\nx y\n", {}, r":3: expected 'i j' or 'i j weight', got 'x y'"),
        ("0\n", {}, r":1: expected 'i j' or 'i j weight', got '0'"),
        ("0 1 2 3\n", {}, r":1: expected 'i j' or 'i j weight', got '0 1 2 3'"),
        ("0 0\n", {}, r":1: expected two different workers, got '0 0'"),
        ("0 1\n1 2\n1 0\n", {}, r":3: edge 1 0: expected each edge once, got it on line 1 too \(edges go both"),
        ("0 1 0.5\n", {}, r":1: expected no weight unless weights='explicit', got '0 1 0\.5'"),
        ("0 1\n", {"weights": "explicit"}, r":1: expected 'i j weight' with 0 < weight <= 1, got '0 1'"),
        ("0 1 -0.5\n", {"weights": "explicit"}, r":1: expected 'i j weight' with 0 < weight <= 1"),
        ("0 1 nan\n", {"weights": "explicit"}, r":1: expected 'i j weight' with 0 < weight <= 1"),
        ("0 1\n1 2\n", {}, r"expected a connected graph, got workers that are not reached from worker 0: 3"),
        ("", {}, r"not reached from worker 0: 1, 2, 3"),
        (
            "0 1\n1 2\n2 3\n",
            {"weights": "push_sum", "directed": True},
            r"expected a strongly connected graph, got workers that are not on a path to worker 0: 1, 2, 3",
        ),
        (
            "0 1 0.6\n0 2 0.6\n0 3 0.1\n",
            {"weights": "explicit"},
            r"weights that worker 0 takes: expected a sum <= 1, got 1\.3",
        ),
        (
            "0 1 0.5\n1 2 0.25\n2 3 0.5\n3 0 0.5\n",
            {"weights": "explicit", "directed": True},
            r"weights that worker 1 gives, and keeps: expected a sum of 1 \(doubly.*got 0\.75; or use weights=",
        ),
        ("0 1\n", {"directed": True}, r"expected 'push_sum' or 'explicit' for a directed graph, got 'metropolis'"),
        ("0 1\n", {"weights": "metropolitan"}, r"weights: expected one of .*did you mean 'metropolis'\?"),
        ("0 1\n", {"directed": "yes"}, r"directed: expected true or false, got 'yes'"),
    ],
)
def test_bad_files_are_refused_with_the_line(write, text, options, message):
    with pytest.raises(ValueError, match=message):
        build("file", 4, path=write(text), **options)


def test_missing_or_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.txt: expected a readable edge list, got: No such file"):
        build("file", 4, path=tmp_path / "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected a readable edge list, got: not UTF-8 text"):
        build("file", 4, path=tmp_path / "binary")
    with pytest.raises(ValueError, match="topology 'file': path: expected a value for this option, got none"):
        build("file", 4)
