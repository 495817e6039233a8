"""The planner: its recommendation, its figures for mixing, its command line."""

import numpy as np
import pytest

from common.options import LocalSteps
from common.planner.__main__ import main
from common.planner.plan import plan, sensitivity
from tests.planner.clusters import cluster


def test_gossip_is_not_recommended_where_the_network_is_fast() -> None:
    planned = plan(cluster(inter_gbps=1e5), ["one_peer_exponential"], steps=60)
    assert planned.recommendation.startswith("Stay with all-reduce")


def test_gossip_is_recommended_where_the_network_is_slow() -> None:
    planned = plan(cluster(hosts=4, workers_per_host=4, gossip_bucket_mb=10.0), ["complete", "aer"], steps=60)
    assert planned.recommendation.startswith("Take aer with staggered phases: ")
    assert planned.frame.speedup[0] == 1
    assert planned.frame.contraction_per_s.isna().sum() == 0
    assert np.isinf(planned.frame.contraction_per_s[planned.frame.topology == "complete"]).all()


def test_one_peer_topologies_are_tried_between_hosts_too() -> None:
    frame = plan(cluster(hosts=4, workers_per_host=2), ["one_peer_exponential"], steps=60).frame
    assert list(frame.topology) == ["complete", "one_peer_exponential", "one_peer_exponential between hosts"]


def test_mixing_is_not_computed_for_more_workers_than_eigenvalues_are_cheap_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.planner.plan.MOST_EIGENVALUES", 8)
    frame = plan(cluster(hosts=6, workers_per_host=2, gossip_bucket_mb=50.0), ["ring", "one_peer_ring"], steps=24).frame
    known = frame[frame.method == "gossip"].set_index(["topology", "phases"]).contraction_per_s.notna().to_dict()
    assert known == {
        ("ring", "aligned"): False,
        ("one_peer_ring", "aligned"): False,
        ("one_peer_ring", "staggered"): False,
        ("one_peer_ring between hosts", "aligned"): True,
    }


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["hosts=4", "workers_per_host=2", "compute_ms=40", "jitter=0.1", "inter_gbps=25", "steps=60"]
    slow = ["slow_host.1=1.5", "slow_link.2=2"]
    assert main(["plan", *numbers, *slow, "topology=aer"]) == 0
    answer = capsys.readouterr().out
    assert "Predicted for 4 hosts of 2 workers" in answer
    assert "| gossip     | aer" in answer


def test_local_steps_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    slow = cluster(hosts=4, workers_per_host=4, inter_gbps=1.0)
    every, tenth = (
        plan(slow, ["complete", "aer", "ring"], local, steps=60).frame for local in (None, LocalSteps(10, 4))
    )
    assert list(every.topology) == list(tenth.topology)
    gossip = every.method == "gossip"
    assert (tenth.step_ms[gossip] < 0.3 * every.step_ms[gossip]).all()
    assert (tenth.step_ms == every.step_ms)[~gossip].all()
    numbers = ["hosts=4", "workers_per_host=2", "steps=60", "topology=aer", "inter_gbps=1"]
    answers = []
    for more in ([], ["local_steps=10"], ["local_steps=10", "merge_after=4"]):
        assert main(["plan", *numbers, *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1] == answers[2]
    memory = []
    for more in ([], ["outer.lr=0.4"], ["outer.lr=0.4", "outer.momentum=0.9"], ["merge_after=0"]):
        assert main(["plan", *numbers, "payload_mb=1000", "local_steps=10", *more]) == 0
        row, *_ = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| gossip"))
        memory.append(float(row.split("|")[-2]))
    assert np.diff(memory) == pytest.approx([0, 1, -2])  # GB: anchors, which late merging keeps too, and momentum
    assert main(["plan", *numbers, "outer.lr=2"]) == 2
    assert "outer.lr=2.0: expected a number in (0, 2)" in capsys.readouterr().err


def test_shards_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["hosts=4", "payload_mb=800", "steps=60", "topology=one_peer_exponential"]
    assert main(["plan", *numbers, "shards=8", "optimizer=accumadamw"]) == 0
    answer = capsys.readouterr().out
    assert "Predicted for 4 hosts of 1 worker of 8 GPUs:" in answer
    (row,) = (line for line in answer.splitlines() if line.startswith("| gossip"))
    assert [float(value) for value in row.split("|")[-3:-1]] == [100, 0.6]  # of 100 MB: 1 + 1 + 3 + 1
    assert main(["plan", *numbers, "shards=0"]) == 2
    assert "shards=0: expected greater than or equal to 1" in capsys.readouterr().err


def test_several_topologies_of_which_one_does_not_exist_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "hosts=3", "workers_per_host=2", "steps=60", "topology=[ring,star,aer]"]) == 0
    answer = capsys.readouterr().out
    assert "| ring " in answer
    assert "| star " in answer
    assert "aer: not possible here: topology 'aer': number of hosts" in answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hosts=0"], "hosts=0: expected an integer in [1, 16384]"),
        (["hosts=4", "jitter=5"], "jitter=5.0: expected a number in [0, 1] (0.05 is about 5 %)"),
        (["hosts=4", "payload_mb=1e300"], "payload_mb=1e+300: expected a number in [1e-09, 1e+09]"),
        (["hosts=4", "payload_mb=1e9"], "payload_mb=1e+09 with bucket_mb=25: expected at most 262144 buckets"),
        (["hosts=1000", "workers_per_host=1000"], "hosts=1000 with workers_per_host=1000: expected at most 16384"),
        (["hosts=4", "slow_host.9=2"], "slow_hosts={9: 2.0}"),
        (["hosts=4", "slow_host.0=.inf"], "slow_host.0=inf: expected a finite number"),
        (["hosts=4", "slow_link.9=2"], "slow_links={9: 2.0}"),
        (["hosts=4", "slow_host=x"], "slow_host='x': expected a valid dictionary"),
        (["hosts=4", "steps=3"], "steps=3: expected greater than or equal to 50"),
        (["hosts=4", "steps=1000000000000"], "steps=1000000000000: expected less than or equal to 10000"),
        (["hosts=4", "topology=rign"], "did you mean 'ring'?"),
        (["hosts=4", "ranks_per_host=2"], "did you mean 'workers_per_host'?"),
        (["--hosts", "4", "--ranks-per-host=2"], "did you mean 'workers_per_host'?"),
        ([], "hosts=...: missing"),
        (["--measure"], "measure: unknown key"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_uneven_computing_in_terms_of_even_computing() -> None:
    """On free links every method waits for the slow host, and only jitter tells how many a step waits for."""
    free = cluster(hosts=16, inter_gbps=1e6, intra_gbps=1e6, latency_us=0.0, intra_latency_us=0.0)
    frame = sensitivity(free, ["complete", "one_peer_ring"], steps=400).set_index(["method", "topology"])
    assert list(frame.slow_host) == pytest.approx([1.5, 1.5, 1.5], rel=0.01)
    allreduce, ring = frame.loc[("all-reduce", "complete")], frame.loc[("gossip", "one_peer_ring")]
    for name in ("jitter_10", "jitter_30", "stalls"):
        assert allreduce[name] > ring[name] > 1
    # Of 16 normal numbers the largest lies 1.77 standard deviations above the mean, on average.
    assert allreduce.jitter_10 == pytest.approx(1 + 0.177, rel=0.02)


def test_uneven_computing_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "hosts=4", "steps=60", "topology=ring", "--uneven"]) == 0
    answer = capsys.readouterr().out
    assert "- stalls: 1 % of steps 10 times longer" in answer
    assert "jitter_10 |   jitter_30 |   slow_host |   stalls |" in answer
