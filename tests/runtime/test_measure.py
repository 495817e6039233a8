"""Measurement on local processes; conclusions from given measurements, by hand."""

import os

import numpy as np
import pytest
import torch

from common.runtime import Cluster
from common.runtime.measure import Measured, _links, _variation, layout, measure
from tests.distributed.processes import collect, run_processes


def on_hosts(rank: int, n: int, ranks_per_host: int) -> Measured:
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_host), GROUP_RANK=str(rank // ranks_per_host))
    return measure(torch.device("cpu"), message_mb=1.0, sample_s=0.002)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_two_processes_as_two_hosts_or_as_one(ranks_per_host: int) -> None:
    first, second = run_processes(on_hosts, 2, ranks_per_host)
    assert first == second
    assert len(first.hosts) == len(first.inter_gbps or ["one"]) == 2 // ranks_per_host
    rate, latency = (
        (first.inter_gbps[0], first.latency_us) if ranks_per_host == 1 else (first.intra_gbps, first.intra_latency_us)
    )
    assert 0 < rate < 1000
    assert 0 < latency < 1e6
    assert (first.intra_gbps is None) == (ranks_per_host == 1) == (first.latency_us is not None)
    assert first.tflop_per_s > 0
    assert first.jitter >= 0
    assert Cluster(**first.numbers(tflop=0.5)).workers == 2
    assert f"Measured on {2 // ranks_per_host} hosts of {ranks_per_host} ranks, gloo, CPU" in first.lines()[0]


def mixed_up(rank: int, n: int) -> None:
    os.environ.update(LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
    layout()


def test_ranks_must_lie_one_host_after_another() -> None:
    for ok, text in collect(mixed_up, 2, ()):
        assert not ok
        assert "expected equally many on each, one host after another" in text


def test_variation_by_hand() -> None:
    seconds = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    found = _variation(seconds, L=1)
    assert found == {"jitter": 0.0, "slow_hosts": {2: 2.0}}
    noisy = _variation(np.exp(np.random.default_rng(0).normal(0, 0.2, (4, 2000))), L=2)
    assert noisy["jitter"] == pytest.approx(0.2, rel=0.05)
    assert noisy["slow_hosts"] == {}


def test_a_slow_link_slows_its_host_only() -> None:
    """Exchanges of a ring of hosts: each as fast as the slowest of the three links it uses."""
    rates = np.array([90.0, 100.0, 25.0, 100.0, 100.0, 95.0])
    exchanged = np.minimum(np.minimum(np.roll(rates, 1), rates), np.roll(rates, -1))
    assert list(exchanged) == [90, 25, 25, 25, 95, 90]
    links = _links(exchanged)
    assert links == (90.0, 90.0, 25.0, 95.0, 95.0, 95.0)
    measured = Measured("nccl", "A", tuple("abcdef"), 1, links, None, 12.0, None, 50.0, 0.05, {})
    assert measured.slow_links == {2: pytest.approx(92.5 / 25)}
    assert list(Cluster(**measured.numbers(tflop=2.0)).link_gbps) == pytest.approx([92.5, 92.5, 25, 92.5, 92.5, 92.5])
    assert measured.lines()[-1] == "- slower hosts: none; slower links: c 3.70 times"
    assert _links([30.0, 31.0]) == (31.0, 31.0)  # which of the two is slow, nobody knows


def test_numbers_of_a_cluster() -> None:
    measured = Measured("nccl", "A", ("a", "b"), 4, (90.0, 80.0), 300.0, 12.0, 4.0, 50.0, 0.05, {1: 1.3})
    assert Cluster(**measured.numbers(tflop=2.0)) == Cluster(
        hosts=2, workers_per_host=4, inter_gbps=85.0, intra_gbps=300.0, latency_us=12.0, intra_latency_us=4.0,
        compute_ms=40.0, jitter=0.05, slow_hosts={1: 1.3},
    )  # fmt: skip
    assert "compute_ms" not in measured.numbers()
    assert "b 1.30 times" in measured.lines()[-1]
