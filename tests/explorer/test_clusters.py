"""Topologies and predictions as the page has them, against the modules that they come from and against recursions."""

import numpy as np
import pytest

from common.explorer import clusters
from common.explorer.clusters import EXAMPLES, amplification, cluster_of, planner, travelling
from common.planner.plan import plan
from common.topology import NAMES, Transport, build


def stationary(name: str, n: int, size: int, order: str, beta: float) -> float:
    """The root mean square distance by its covariance, iterated: x' = W x + d or W (x + d), d' = beta d + e."""
    topology = build(name, n, size)
    J, eye, zero = np.full((n, n), 1 / n), np.eye(n), np.zeros((n, n))
    C = np.zeros((2 * n, 2 * n))
    noise = (1 - beta**2) * np.block([[zero, zero], [zero, eye]])
    C[n:, n:] = eye
    squares = []
    for t in range(60 * topology.period * n):
        W = topology.matrix(t)
        A = np.block([[W, W if order == "atc" else eye], [zero, beta * eye]])
        C = A @ C @ A.T + noise
        C[:n, :n] = (eye - J) @ C[:n, :n] @ (eye - J)  # the mean drifts away
        C[:n, n:] = (eye - J) @ C[:n, n:]
        C[n:, :n] = C[:n, n:].T
        squares.append(np.trace(C[:n, :n]))
    return float(np.sqrt(np.mean(squares[-topology.period :]) / (n - 1)))


@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "aer"])
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_spread_is_the_fixed_point_of_the_covariance(name: str, order: str, beta: float) -> None:
    expected = stationary(name, 8, 2, order, beta)
    assert amplification(name, 8, 2, order, beta) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_rounds_travel_as_their_transport_says() -> None:
    for name in (name for name in NAMES if name != "file"):
        for n, size in ((8, 2), (8, 1), (6, 2)):
            try:
                topology = build(name, n, size)
            except ValueError:
                continue
            for round_ in topology.sample[:3]:
                found = travelling(round_, size)
                agents = round_.between_hosts(size) if found["kind"] == Transport.HIERARCHICAL else round_
                edges = {(i, j) for i in range(agents.world_size) for j in agents.out_peers(i)}
                k = found["agents"]
                if "groups" in found:
                    got = {(a, b) for group in found["groups"] for a in group for b in group if a != b}
                elif "offsets" in found:
                    got = {(i, (i + offset) % k) for i in range(k) for offset in found["offsets"]}
                else:
                    got = {*zip(found["edges"][::2], found["edges"][1::2], strict=True)}
                assert got == edges, (name, n, size)


def test_every_family_is_there_with_its_gap(monkeypatch) -> None:
    monkeypatch.setattr(clusters, "WORKERS", (4, 6))
    found = clusters.topologies()["families"]
    assert {*NAMES} - {"file"} <= found.keys()
    assert "4/1" in found["hypercube"]
    assert "6/1" not in found["hypercube"]
    assert found["ring"]["6/2"]["gap"] == pytest.approx(build("ring", 6, 2).spectral_gap(), rel=1e-5)
    assert found["aer"]["4/2"]["consensus"] == build("aer", 4, 2).rounds_to_consensus()


def test_examples_are_what_the_planner_plans() -> None:
    settings, example = EXAMPLES[0], planner()["examples"][0]
    cluster = cluster_of(settings)
    assert (cluster.payload_mb, cluster.inter_gbps, cluster.latency_us) == (1400, 10, 20)
    methods = [step["method"] for step in example["steps"]]
    frame = plan(cluster, steps=clusters.STEPS).frame
    names = [
        row.method if row.method == "all-reduce" else f"{row.topology}{', staggered' * (row.phases == 'staggered')}"
        for row in frame.itertuples()
    ]
    assert methods == names
    assert [step["step"] for step in example["steps"]] == pytest.approx(frame.step_ms.tolist(), rel=1e-9)
