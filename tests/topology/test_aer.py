"""The alternating exponential ring against its description (paper.md, section A)."""

import pytest

from common.topology import build

SHAPES = [(hosts, workers) for hosts in (2, 4, 8, 16) for workers in (1, 2, 4)]


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


@pytest.mark.parametrize(("hosts", "workers"), SHAPES)
def test_groups_follow_the_description(hosts, workers):
    topology = build("aer", hosts * workers, workers)
    assert [set(map(frozenset, round_.groups)) for round_ in topology.sample] == reference_rounds(hosts, workers)


@pytest.mark.parametrize(("hosts", "workers"), SHAPES)
def test_half_of_the_hosts_talk_across_in_every_round(hosts, workers):
    topology = build("aer", hosts * workers, workers)
    crossings = []
    for round_ in topology.sample:
        across = {
            host
            for host in range(hosts)
            if any(j // workers != host for i in ranks_of(host, workers) for j in round_.in_peers(i))
        }
        crossings.append(across)
        for group in round_.groups:
            touched = {i // workers for i in group}
            assert len(group) == workers * len(touched)  # whole hosts, one or two
            assert len(touched) == (2 if touched <= across else 1)
    for first, second in zip(crossings[::2], crossings[1::2], strict=True):
        assert first | second == set(range(hosts))
        assert not first & second
        if hosts > 2:  # the only pair of two hosts talks in one of the two rounds
            assert len(first) == len(second) == hosts // 2


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_host_averages_completely(n):
    topology = build("aer", n, n)
    assert topology.period == 1
    assert topology.round(0) == build("complete", n).round(0)


@pytest.mark.parametrize(("n", "workers", "hosts"), [(3, 1, 3), (12, 2, 6), (20, 4, 5), (24, 2, 12)])
def test_other_numbers_of_hosts_are_refused_with_advice(n, workers, hosts):
    with pytest.raises(ValueError, match=rf"power of two \(1, 2, 4, 8, \.\.\.\).*= {hosts}; .*base_k"):
        build("aer", n, workers)


def test_hosts_must_be_full():
    with pytest.raises(ValueError, match=r"workers_per_host: expected a divisor of world_size=6, got 4"):
        build("aer", 6, 4)
