"""The runtime model against closed forms and a worker-by-worker replay of its recurrences."""

import math
from pathlib import Path

import numpy as np
import pytest

from common.runtime import Cluster, allreduce_ms, round_ms, simulate_allreduce, simulate_gossip
from common.runtime.__main__ import main
from common.runtime.plan import plan
from common.runtime.steps import DISCARDED
from common.topology import build


def cluster(**changes) -> Cluster:
    values = {"hosts": 4, "payload_mb": 100.0, "compute_ms": 50.0, "inter_gbps": 10.0, "latency_us": 0.0}
    return Cluster(**values | changes)


# -- the network


def test_ring_allreduce_is_the_published_formula() -> None:
    """arXiv 2110.13363: 2 M/B + 2 n L, the bandwidth term exactly 2 (n-1)/n."""
    assert allreduce_ms(cluster(), 100.0) == pytest.approx(2 * 3 / 4 * 80.0)
    assert allreduce_ms(cluster(latency_us=100.0), 100.0) == pytest.approx(120.0 + 6 * 0.1)
    assert allreduce_ms(cluster(hosts=1), 100.0) == 0
    inside = cluster(hosts=1, ranks_per_host=4, intra_gbps=100.0)
    assert allreduce_ms(inside, 100.0) == pytest.approx(2 * 3 / 4 * 8.0)


def test_a_one_peer_round_is_one_message() -> None:
    """arXiv 2110.13363: M/B + L."""
    exchange = round_ms(cluster(latency_us=500.0), build("one_peer_exponential", 4).round(0))
    assert exchange == pytest.approx([80.5] * 4)


def test_ranks_of_a_host_share_its_link() -> None:
    two = cluster(hosts=2, ranks_per_host=2, intra_gbps=1000.0)
    within, across = build("one_peer_exponential", 4, 2).round(0), build("one_peer_exponential", 4, 2).round(1)
    assert round_ms(two, across) == pytest.approx([160.0] * 4)  # both ranks send to the other host
    assert round_ms(two, within) == pytest.approx([80.0] * 4)  # 1 -> 2 and 3 -> 0 leave, all have a partner there


def test_rounds_of_aer_cost_only_those_who_talk_across() -> None:
    eight = cluster(hosts=4, ranks_per_host=2, intra_gbps=400.0)
    exchange = round_ms(eight, build("aer", 8, 2).round(0))
    assert sorted(set(np.round(exchange, 6))) == pytest.approx([2.0, 2 * 3 / 4 * 80.0])
    assert sum(exchange > 10) == 4


# -- steps without jitter: closed forms


@pytest.mark.parametrize("inter_gbps", [5.0, 10.0, 40.0])
def test_gossip_takes_the_longer_of_computing_and_sending(inter_gbps: float) -> None:
    c = cluster(inter_gbps=inter_gbps, update_ms=3.0)
    sending = 8 * 100.0 / inter_gbps
    topology = build("one_peer_exponential", 4)
    assert simulate_gossip(c, topology).step == pytest.approx(max(50.0, sending) + 3.0)
    assert simulate_gossip(c, topology, "atc").step == pytest.approx(50.0 + sending + 3.0)


def test_gossip_without_a_network_is_computing_alone() -> None:
    c = cluster(hosts=1)
    times = simulate_gossip(c, build("complete", 1))
    assert (times.step, times.exposed) == (pytest.approx(50.0), pytest.approx(0.0))


def test_allreduce_hides_all_but_its_last_bucket_behind_a_slow_backward() -> None:
    c = cluster(inter_gbps=100.0, bucket_mb=25.0)  # 4 buckets of 3 ms each; backward 33 ms
    assert simulate_allreduce(c).step == pytest.approx(50.0 + allreduce_ms(c, 25.0))


def test_allreduce_on_a_slow_network_is_forward_first_bucket_and_the_whole_payload() -> None:
    c = cluster(inter_gbps=0.1, bucket_mb=25.0)
    first_ready = 50.0 * (1 / 3 + 2 / 3 / 4)
    assert simulate_allreduce(c).step == pytest.approx(first_ready + allreduce_ms(c, 100.0))


# -- jitter


def test_waiting_for_all_is_the_mean_of_the_largest() -> None:
    c = cluster(hosts=8, inter_gbps=1e9, intra_gbps=1e9, jitter=0.3)
    times = simulate_allreduce(c, steps=400)
    assert times.step == pytest.approx(c.draw_compute_ms(400, 0)[DISCARDED:].max(axis=1).mean(), rel=1e-6)
    assert times.compute == pytest.approx(50.0, rel=0.02)


def test_gossip_waits_less_than_allreduce_and_a_slow_host_drags_both() -> None:
    c = cluster(hosts=16, inter_gbps=1e9, intra_gbps=1e9, jitter=0.5)
    one_peer = build("one_peer_exponential", 16)
    assert simulate_gossip(c, one_peer).step < 0.9 * simulate_allreduce(c).step
    slow = cluster(hosts=16, inter_gbps=1e9, intra_gbps=1e9, slow_hosts={3: 2.0})
    assert simulate_gossip(slow, one_peer, steps=400).step == pytest.approx(100.0, rel=0.02)
    assert simulate_allreduce(slow).step == pytest.approx(100.0)


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_the_recurrence_worker_by_worker(order: str) -> None:
    c = cluster(hosts=6, jitter=0.4, update_ms=2.0)
    topology, steps = build("ring", 6), 60
    compute = c.draw_compute_ms(steps, 7)
    history = [dict.fromkeys(range(6), 0.0)]
    for t in range(steps):
        before, after = history[-1], {}
        for i in range(6):
            peers = [i, (i + 1) % 6, (i - 1) % 6]
            sending = 2 * 80.0  # to both neighbours, over one link
            if order == "awc":
                after[i] = max(before[i] + compute[t, i], max(before[j] for j in peers) + sending) + 2.0
            else:
                after[i] = max(before[j] + compute[t, j] + 2.0 for j in peers) + sending
        history.append(after)
    mean = (np.mean([*history[-1].values()]) - np.mean([*history[DISCARDED].values()])) / (steps - DISCARDED)
    assert simulate_gossip(c, topology, order, steps=steps, seed=7).step == pytest.approx(mean)


def test_thousands_of_workers() -> None:
    many = cluster(hosts=1024, ranks_per_host=4)
    times = simulate_gossip(many, build("one_peer_exponential", 4096, 4), steps=50)
    assert math.isfinite(times.step)


# -- the plan


def test_gossip_is_not_recommended_where_the_network_is_fast() -> None:
    assert plan(cluster(inter_gbps=1e5)).recommendation.startswith("Stay with all-reduce")


def test_gossip_is_recommended_where_the_network_is_slow() -> None:
    planned = plan(cluster(hosts=4, ranks_per_host=4, inter_gbps=10.0))
    assert planned.recommendation.startswith("Take ")
    best = planned.frame.loc[planned.frame.speedup.idxmax()]
    assert best.topology == "aer"
    assert planned.frame.speedup[0] == 1


def test_topologies_that_do_not_fit_are_named() -> None:
    assert "aer" in plan(cluster(hosts=3)).skipped


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--hosts=4", "--ranks-per-host=2", "--compute-ms=40", "--jitter=0.1", "--inter-gbps=25"]
    main(["plan", *numbers, "--slow-host", "1=1.5", "--plot", str(tmp_path / "plan.png")])
    answer = capsys.readouterr().out
    assert "Predicted for 4 hosts of 2 workers" in answer
    assert "| gossip     | aer" in answer
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "hosts=0: expected a number > 0"),
        (["--hosts", "4", "--jitter", "-1"], "jitter=-1.0: expected a number >= 0"),
        (["--hosts", "4", "--slow-host", "9=2"], "slow_hosts={9: 2.0}"),
        (["--hosts", "4", "--slow-host", "x"], "expected HOST=FACTOR"),
        (["--hosts", "4", "--steps", "3"], "--steps 3"),
        ([], "--hosts"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
