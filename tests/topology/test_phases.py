"""Staggered schedules: another order of the same rounds, which mixes as well and sends evenly."""

import numpy as np
import pytest

from common.topology import Round, Topology, build, bytes_leaving_host, in_phases


@pytest.mark.parametrize("workers_per_host", [1, 2, 4])
@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_every_host_talks_across_once_in_each_step_of_staggered_aer(hosts, workers_per_host):
    topology = build("aer", hosts * workers_per_host, workers_per_host)
    aligned, staggered = in_phases(topology, "staggered")
    assert aligned is topology
    for t in range(topology.period):
        for host in range(hosts):
            sent = [bytes_leaving_host(phase.round(t), host, workers_per_host, 0.5) for phase in (aligned, staggered)]
            assert sorted(sent) == [0, 0.5], (t, host)  # half of the parameters each, one of them at a time
    cycle = np.linalg.multi_dot([*(staggered.matrix(t) for t in reversed(range(topology.period)))])
    np.testing.assert_allclose(cycle, 1 / topology.world_size, atol=1e-12)


@pytest.mark.parametrize("name", ["one_peer_exponential", "ring", "complete"])
def test_a_period_mixes_as_before(name):
    topology = build(name, 6)
    _, staggered = in_phases(topology, "staggered")
    assert staggered.period == topology.period
    assert staggered.fingerprint() != topology.fingerprint()  # all workers must agree on it
    product = {
        phase.name: np.linalg.multi_dot([np.eye(6), np.eye(6), *(phase.matrix(t) for t in range(phase.period))])
        for phase in (topology, staggered)
    }
    np.testing.assert_allclose(product[staggered.name], product[name], atol=1e-12)


def test_two_rounds_that_do_not_commute_take_turns_one_step_later():
    topology = build("one_peer_ring", 8)
    assert topology.period == 2
    _, staggered = in_phases(topology, "staggered")
    for t in range(4):
        np.testing.assert_array_equal(staggered.matrix(t), topology.matrix(t + 1))


def test_what_cannot_be_staggered_is_refused():
    with pytest.raises(ValueError, match=r"phases='staggered': topology 'random_matching' is random"):
        in_phases(build("random_matching", 4), "staggered")
    pairs = [Round.from_groups([pair], 4) for pair in ((0, 1), (1, 2), (2, 3))]
    path = Topology("path", 4, schedule=tuple(pairs))
    with pytest.raises(ValueError, match="rounds 0 and 1 of topology 'path' do not commute"):
        in_phases(path, "staggered")
    with pytest.raises(ValueError, match="phases='diagonal': expected one of aligned, staggered"):
        in_phases(path, "diagonal")
