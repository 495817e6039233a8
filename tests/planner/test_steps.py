"""Simulated runs against closed forms, a worker-by-worker replay, and bounds that no schedule can beat."""

import math

import numpy as np
import pytest

from common.options import LocalSteps
from common.planner import simulate_allreduce, simulate_gossip
from common.planner.links import allreduce_ms, mb_ms
from common.planner.steps import DISCARDED, staggering_pays
from common.topology import build
from common.topology.cost import bytes_leaving_hosts
from tests.planner.clusters import cluster

# -- without jitter: closed forms


@pytest.mark.parametrize("inter_gbps", [5.0, 10.0, 12.0, 40.0])
def test_gossip_takes_the_longer_of_computing_and_sending(inter_gbps: float) -> None:
    c = cluster(inter_gbps=inter_gbps, update_ms=3.0, gossip_bucket_mb=0.01)
    sending = mb_ms(100.0, inter_gbps)
    topology = build("one_peer_exponential", 4)
    assert simulate_gossip(c, topology).step == pytest.approx(max(50.0 + 3.0, sending), rel=0.01)
    first_update_ms = 3.0 / c.gossip_buckets  # the others come while earlier buckets travel
    assert simulate_gossip(c, topology, "atc").step == pytest.approx(50.0 + first_update_ms + sending)


def test_momentum_is_sent_before_the_parameters() -> None:
    """A second message of the same size, after computing; of 2 buckets the first leaves after half of the update."""
    c = cluster(inter_gbps=10.0, update_ms=3.0, gossip_bucket_mb=50.0)
    sending = mb_ms(100.0, 10.0)
    topology = build("one_peer_exponential", 4)
    without = simulate_gossip(c, topology, "atc").step
    assert without == pytest.approx(50.0 + 1.5 + sending)
    times = simulate_gossip(c, topology, "atc", momentum=True)
    assert times.step == pytest.approx(without + sending)
    assert times.exposed == pytest.approx(2 * sending - 3.0 + 1.5)
    with pytest.raises(ValueError, match="order='awc': expected 'atc'"):
        simulate_gossip(c, topology, "awc", momentum=True)


@pytest.mark.parametrize("inter_gbps", [0.5, 2.0, 10.0])
@pytest.mark.parametrize(("H", "tau"), [(1, 1), (1, 0), (6, 0), (6, 1), (6, 3), (6, 6), (30, 10)])
def test_a_round_of_local_steps_waits_before_its_update_number_tau(inter_gbps: float, H: int, tau: int) -> None:
    c = cluster(inter_gbps=inter_gbps, update_ms=3.0, gossip_bucket_mb=0.01)
    sending = mb_ms(100.0, inter_gbps)
    if tau:
        round_ms = max(50.0 * tau + 3.0 * (tau - 1), sending) + 50.0 * (H - tau) + 3.0 * (H - tau + 1)
    else:
        round_ms = 53.0 * H + sending
    topology = build("one_peer_exponential", 4)
    assert simulate_gossip(c, topology, local=LocalSteps(H, tau)).step == pytest.approx(round_ms / H)


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_fragments_take_turns_within_a_round(tau: int) -> None:
    """Two fragments of 100 ms each on the link, 60 ms to compute: each is waited for once in a round of 6 updates."""
    c = cluster(inter_gbps=8.0, payload_mb=200.0, compute_ms=60.0, gossip_bucket_mb=1.0)
    waits = 2 * max(0.0, 100.0 - 60.0 * tau)
    topology = build("one_peer_exponential", 4)
    assert simulate_gossip(c, topology, local=LocalSteps(6, tau, fragments=2)).step == pytest.approx(60.0 + waits / 6)
    with pytest.raises(ValueError, match="fragments=3: expected at most the 2 buckets"):
        simulate_gossip(cluster(payload_mb=2.0, gossip_bucket_mb=1.0), topology, local=LocalSteps(6, tau, fragments=3))


def test_two_hosts_two_buckets_by_hand() -> None:
    """10 ms on the link for a bucket, 5 ms to compute, 2 ms to update a bucket.

    Merged and updated at 12, 22 (bucket 1 arrives at 20); the second step's messages find the link free at 20 and 30,
    arrive at 30 and 40 and are updated at 32, 42: the link never rests, 20 ms a step. With 30 ms to compute all have
    long arrived.
    """
    values = {"hosts": 2, "payload_mb": 20.0, "gossip_bucket_mb": 10.0, "inter_gbps": 8.0, "update_ms": 4.0}
    pair = build("complete", 2)
    assert simulate_gossip(cluster(**values, compute_ms=5.0), pair).step == pytest.approx(20.0)
    assert simulate_gossip(cluster(**values, compute_ms=30.0), pair).step == pytest.approx(34.0)


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("compute_ms", [20.0, 60.0, 100.0])
def test_aer_goes_across_every_second_step(hosts: int, compute_ms: float) -> None:
    c = cluster(hosts=hosts, workers_per_host=2, compute_ms=compute_ms, intra_gbps=1e9, gossip_bucket_mb=25.0)
    aer = build("aer", 2 * hosts, 2)
    aligned = simulate_gossip(c, aer, steps=44).step
    assert aligned == pytest.approx((max(compute_ms, 80.0) + compute_ms) / 2, rel=1e-5)
    staggered = simulate_gossip(c, aer, phases="staggered", steps=44).step
    assert staggered == pytest.approx(max(compute_ms, 40.0), rel=1e-5)


@pytest.mark.parametrize("inter_gbps", [0.1, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("bucket_mb", [7.0, 25.0, 100.0])
def test_allreduce_is_the_closed_form(inter_gbps: float, bucket_mb: float) -> None:
    c = cluster(inter_gbps=inter_gbps, bucket_mb=bucket_mb, update_ms=2.0)
    bucket_ms = allreduce_ms(c, c.payload_mb / c.buckets)
    # Either the messages follow each other after the first bucket's backward, or the last one follows the backward.
    forward, backward = 50.0 / 3, 100.0 / 3
    travel = max(backward / c.buckets + c.buckets * bucket_ms, backward + bucket_ms)
    assert simulate_allreduce(c).step == pytest.approx(forward + travel + 2.0)


@pytest.mark.parametrize(
    ("name", "n", "L", "pays"),
    [
        ("aer", 16, 4, True),
        ("aer", 8, 1, True),
        ("aer", 4, 2, True),
        ("one_peer_ring", 8, 2, True),
        ("one_peer_ring", 6, 3, False),  # a message leaves every host in every step
        ("one_peer_ring", 8, 1, False),
        ("ring", 8, 2, False),  # one round only
        ("complete", 8, 2, False),
        ("hypercube", 8, 2, False),  # its third round keeps its place
        ("one_peer_exponential", 8, 2, False),
        ("one_peer_exponential", 4, 2, True),
        ("random_matching", 8, 2, False),
    ],
)
def test_staggered_phases_are_for_topologies_that_then_send_less_in_the_busiest_step(name, n, L, pays) -> None:
    c, topology = cluster(hosts=n // L, workers_per_host=L), build(name, n, L)
    assert staggering_pays(topology, L) == pays
    if not pays:
        with pytest.raises(ValueError, match=rf"phases=.staggered.: expected .*, got {name} on hosts of {L}"):
            simulate_gossip(c, topology, phases="staggered")


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="topology of 8 workers on a cluster of 4"):
        simulate_gossip(cluster(), build("ring", 8))


@pytest.mark.parametrize("options", [{}, {"flat": True}, {"local": LocalSteps(4, 2)}], ids=str)
def test_all_workers_average_as_on_the_complete_graph(options: dict) -> None:
    c = cluster(hosts=2, workers_per_host=2, jitter=0.2, inter_gbps=2.0)
    everybody, graph = (simulate_gossip(c, topology, steps=60, **options) for topology in (None, build("complete", 4)))
    assert everybody.step == pytest.approx(graph.step)
    with pytest.raises(ValueError, match=r"phases=.staggered.: expected .*, got complete on hosts of 2"):
        simulate_gossip(c, None, phases="staggered")


# -- with jitter


def test_waiting_for_all_is_the_mean_of_the_largest() -> None:
    c = cluster(hosts=8, inter_gbps=1e9, intra_gbps=1e9, jitter=0.3)
    times = simulate_allreduce(c, steps=400)
    assert times.step == pytest.approx(c.draw_compute_ms(400, 0)[DISCARDED:].max(axis=1).mean(), rel=1e-6)
    largest = 50.0 * np.random.default_rng(1).lognormal(-(0.3**2) / 2, 0.3, (100_000, 8)).max(axis=1)
    assert times.step == pytest.approx(largest.mean(), rel=0.03)
    assert times.compute == pytest.approx(50.0, rel=0.02)


def test_gossip_waits_less_than_allreduce_and_a_slow_host_drags_both() -> None:
    c = cluster(hosts=16, inter_gbps=1e9, intra_gbps=1e9, jitter=0.5)
    one_peer = build("one_peer_exponential", 16)
    assert simulate_gossip(c, one_peer).step < 0.9 * simulate_allreduce(c).step
    slow = cluster(hosts=16, inter_gbps=1e9, intra_gbps=1e9, slow_hosts={3: 2.0})
    assert simulate_gossip(slow, one_peer, steps=400).step == pytest.approx(100.0, rel=0.02)
    assert simulate_allreduce(slow).step == pytest.approx(100.0)


def test_a_slow_link_drags_its_partners() -> None:
    c = cluster(compute_ms=1.0, slow_links={2: 3.0}, gossip_bucket_mb=0.01)
    assert simulate_gossip(c, build("one_peer_exponential", 4), steps=400).step == pytest.approx(240.0, rel=0.03)


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_the_recurrence_worker_by_worker(order: str) -> None:
    """Two buckets, directed one-peer rounds of six hosts: every link carries one message in either direction."""
    c = cluster(hosts=6, jitter=0.4, update_ms=2.0, gossip_bucket_mb=50.0, inter_gbps=16.0, latency_us=3000.0)
    steps, wire = 60, 25.0
    compute = c.draw_compute_ms(steps, 7)
    launched = [[0.0, 0.0] for _ in range(6)]
    ended, through = [0.0] * 6, [0.0] * 6
    history = [ended]
    for t in range(steps):
        hop = 2 ** (t % 3)
        if order == "atc":
            launched = [[ended[i] + compute[t, i] + u for u in (1.0, 2.0)] for i in range(6)]
        sent, got = {}, {}
        for source in range(6):
            target = (source - hop) % 6
            free = max(through[source], through[target])
            for b in range(2):
                free = max(free, launched[source][b], launched[target][b]) + wire
                sent[source, b], got[target, b] = free, free + 3.0
        done = [[max(sent[i, b], got[i, b]) for b in range(2)] for i in range(6)]
        through = [max(pair) for pair in done]
        if order == "atc":
            ended = through
        else:
            for i in range(6):
                first = max(done[i][0], ended[i] + compute[t, i]) + 1.0
                launched[i] = [first, max(first, done[i][1]) + 1.0]
            ended = [pair[1] for pair in launched]
        history.append(ended)
    mean = (np.mean(history[-1]) - np.mean(history[DISCARDED])) / (steps - DISCARDED)
    simulated = simulate_gossip(c, build("one_peer_exponential", 6), order, steps=steps, seed=7)
    assert simulated.step == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "phases"),
    [("aer", "aligned"), ("aer", "staggered"), ("one_peer_ring", "aligned"), ("one_peer_ring", "staggered"),
     ("complete", "aligned")],
)  # fmt: skip
@pytest.mark.parametrize("inter_gbps", [5.0, 10.0])
def test_no_step_is_shorter_than_computing_or_than_its_bytes(name: str, phases: str, inter_gbps: float) -> None:
    L = 2
    c = cluster(hosts=4, workers_per_host=L, jitter=0.5, compute_ms=70.0, update_ms=5.0, inter_gbps=inter_gbps)
    topology = build(name, 8, L)
    leaving = [bytes_leaving_hosts(round_, L, c.payload_mb) for round_ in topology.sample]
    bytes_per_step = sum(map(sum, map(dict.values, leaving))) / len(leaving) / c.hosts
    times = simulate_gossip(c, topology, phases=phases, flat=True, steps=300)
    assert times.step >= max(times.compute, mb_ms(bytes_per_step, c.inter_gbps)) * 0.98


@pytest.mark.parametrize(("name", "L"), [("one_peer_exponential", 1), ("aer", 2), ("complete", 1)])
def test_more_bandwidth_or_less_latency_is_never_slower(name: str, L: int) -> None:
    topology = build(name, 4 * L, L)
    times = [
        simulate_gossip(
            cluster(workers_per_host=L, jitter=0.3, inter_gbps=rate, latency_us=latency, gossip_bucket_mb=12.0),
            topology,
            steps=80,
        ).step
        for rate, latency in [(2.0, 900.0), (2.0, 0.0), (10.0, 0.0), (20.0, 0.0), (1e6, 0.0)]
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_thousands_of_workers() -> None:
    many = cluster(hosts=512, workers_per_host=8)
    assert math.isfinite(simulate_gossip(many, build("one_peer_exponential", 4096, 8), steps=25).step)
    assert simulate_gossip(many, None, steps=25).step == pytest.approx(2 * 511 / 512 * 80.0, rel=0.3)
