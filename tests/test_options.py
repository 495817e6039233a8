"""Which updates begin, merge and end rounds; what is refused, and what is warned of."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import AccumAdamW
from common.options import GossipOptions, LocalSteps, warnings_of
from common.parallel import DecentralizedDataParallel, Mixing, Outer
from common.simulate import simulate
from common.topology import Round, Topology, build


def schedule_of(plan: LocalSteps, updates: int, fragment: int = 0) -> str:
    """Return a letter for each update: m, a merge comes before it; e, a round ends with it; b, both."""
    letters = []
    for clock in range(updates):
        merges, ends = fragment in plan.merging(clock), fragment in plan.ending(clock)
        letters.append("b" if merges and ends else "m" if merges else "e" if ends else ".")
    return "".join(letters)


@pytest.mark.parametrize(
    ("plan", "fragment", "expected"),
    [
        (LocalSteps(), 0, "bbbbbbbb"),
        (LocalSteps(1, 0), 0, "eeeeeeee"),
        (LocalSteps(4, 1), 0, "m..em..e"),
        (LocalSteps(4, 2), 0, ".m.e.m.e"),
        (LocalSteps(4, 4), 0, "...b...b"),
        (LocalSteps(4, 0), 0, "...e...e"),
        (LocalSteps(4, 2, start=3), 0, "bbb.m.e.m.e"),
        (LocalSteps(4, 0, start=3), 0, "eee...e...e"),
        (LocalSteps(4, 1, fragments=2), 1, ".em..em."),
        (LocalSteps(4, 3, fragments=2), 1, "me..me.."),
    ],
)
def test_schedule(plan: LocalSteps, fragment: int, expected: str) -> None:
    assert schedule_of(plan, len(expected), fragment) == expected


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize(("steps", "merge_after"), [(3, 0), (3, 1), (5, 3), (5, 5), (7, 4)])
def test_numbers_of_rounds_agree_with_the_merges_so_far(
    steps: int, merge_after: int, fragments: int, start: int
) -> None:
    """So that a resumed run, which asks for the number, goes on with the round that an uninterrupted one counted to."""
    plan = LocalSteps(steps, merge_after, Outer(), start, fragments)
    for fragment in range(fragments):
        merged = 0
        for clock in range(40):
            assert plan.merged(clock, fragment) == merged
            if merge_after:
                assert set(plan.merging(clock)) <= set(plan.launched(clock))
                merged += fragment in plan.merging(clock)
            else:
                assert plan.launched(clock) == plan.merging(clock) == []
                merged += fragment in plan.ending(clock)


@pytest.mark.parametrize("fragments", [2, 3, 5])
@pytest.mark.parametrize("merge_after", [1, 3, 5, 10])
def test_fragments_are_launched_again_in_the_order_of_their_rounds(merge_after: int, fragments: int) -> None:
    plan = LocalSteps(10, merge_after, fragments=fragments)
    for clock in range(40):
        rounds = [plan.merged(clock, fragment) for fragment in plan.launched(clock)]
        assert rounds == sorted(rounds)


def test_defaults() -> None:
    assert GossipOptions().plan.every_update
    assert GossipOptions().plan == LocalSteps(1, 1) == GossipOptions("awc", merge_after=1).plan
    assert GossipOptions("atc").plan == LocalSteps(1, 0) == GossipOptions(merge_after=0).plan
    assert GossipOptions(local_steps=30).plan.merge_after == 10
    assert GossipOptions("atc", 30).plan.merge_after == 0


def test_vectors_that_are_kept() -> None:
    names = ("local_steps", "merge_after", "outer", "order")

    def kept(*arguments: object) -> int:
        model = simulate(nn.Linear(3, 2), 2, topology="ring", **dict(zip(names, arguments, strict=False)))[0]
        return sum(not name.startswith("layout") for name in model.communication_state())

    assert kept(1) == kept(4, 1) == kept(4, 0) == kept(1, 0) == 0
    assert kept(4, 2) == kept(4, 1, Outer(0.7)) == 1
    assert kept(4, 0, Outer(0.7, 0.9)) == kept(4, 2, Outer(1.0, 0.5)) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"local_steps": 0}, "local_steps=0: expected a number of updates >= 1"),
        ({"local_steps": 3, "merge_after": 4}, "merge_after=4: expected 0 to local_steps=3"),
        ({"local_steps": 3, "merge_after": -1}, "merge_after=-1: expected 0 to local_steps=3"),
        ({"order": "awc", "merge_after": 0}, "merge_after=0 with order=awc"),
        ({"order": "atc", "merge_after": 1}, "merge_after=1 with order=atc"),
        (
            {"local_steps": 3, "outer": Outer(0.7, 0.5, displacement="mixed")},
            "merge_after=1 with outer.displacement=mix",
        ),
        ({"local_steps_from": -1}, "local_steps_from=-1: expected a number of updates >= 0"),
        ({"fragments": 2}, "fragments=2: expected 1 to local_steps=1"),
        ({"local_steps": 3, "fragments": 0}, "fragments=0: expected 1 to local_steps=3"),
        ({"local_steps": 20, "fragments": 20}, "fragments=20: expected at most the number of buckets"),
        ({"local_steps": 3, "push_sum": True}, r"local_steps=3 .* with push_sum=true: expected push_sum=false"),
        ({"mixing": Mixing(3), "push_sum": True}, r"mixing.power=3 with push_sum=true: expected push_sum=false"),
        ({"local_steps": 3, "topology": build("ring", 1, idle_rounds=2)}, "idle_rounds=2: expected idle_rounds=0"),
    ],
)
def test_refusals(arguments: dict, expected: str) -> None:
    """By the engine before any group opens, and by the simulator."""
    arguments = {"topology": "ring"} | arguments
    module = nn.Linear(3, 2)
    for construct in (DecentralizedDataParallel, lambda m, **options: simulate(m, 1, **options)):
        with pytest.raises(ValueError, match=expected):
            construct(module, **arguments)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": 2.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_an_outer_optimizer_out_of_range_is_refused(options: dict) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"outer.{name}={value}: expected a number in"):
        Outer(**options)


def test_local_steps_of_allreduce_are_refused() -> None:
    with pytest.raises(ValueError, match="local_steps=3 with method='allreduce': expected method='decentralized'"):
        simulate(nn.Linear(3, 2), 2, "allreduce", local_steps=3)


def test_a_topology_that_does_not_keep_the_mean_is_refused() -> None:
    directed = Topology("directed", 2, schedule=(Round(({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.75})),))
    with pytest.raises(ValueError, match=r"local_steps=3 .* with topology directed: expected doubly stochastic"):
        GossipOptions(local_steps=3).check_topology(directed)
    GossipOptions(push_sum=True).check_topology(directed)


def growth(topology: Topology, plan: LocalSteps) -> float:
    """Return by which factor (a, v) grows in a round in the end, where inner steps reach the minimum x = 0."""
    W, n, outer = topology.matrix(0), topology.world_size, plan.outer
    a, v = np.split(np.eye(2 * n), 2)
    mixed = W @ a
    # Merged before the last update, x = 0 moves by W a - a; merged earlier, inner steps make up for that.
    d = -a if plan.merge_after == plan.steps > 1 else -mixed
    v = outer.momentum * v + d
    step = d + outer.momentum * v if outer.nesterov else v
    return float(abs(np.linalg.eigvals(np.concatenate([mixed + outer.lr * step, v]))).max())


@pytest.mark.parametrize("name", ["ring", "complete", "torus"])
@pytest.mark.parametrize(("steps", "merge_after"), [(10, 3), (10, 10), (1, 1)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_warnings_come_where_a_linear_model_diverges(name: str, steps: int, merge_after: int, nesterov: bool) -> None:
    topology = build(name, 8)
    for lr in (*np.arange(0.052, 1.98, 0.02), 1.0):  # 1.0 without momentum: no outer optimizer
        for momentum in (0.0, 0.5, 0.9):
            plan = LocalSteps(steps, merge_after, Outer(float(lr), momentum, nesterov))
            diverges = growth(topology, plan) > 1 + 1e-9 and not plan.every_update
            assert bool(warnings_of(plan, topology)) == diverges, (lr, momentum)


def test_warnings_name_the_bound() -> None:
    (ring,) = warnings_of(LocalSteps(30, 10, Outer(0.7, 0.9)), build("ring", 8))
    assert "outer.lr=0.7" in ring
    assert "from 0.4 on" in ring
    (complete,) = warnings_of(LocalSteps(30, 30, Outer(0.7, 0.9)), build("complete", 8))
    assert "above 0.68" in complete
    (late,) = warnings_of(LocalSteps(30, 30), build("ring", 8))  # no outer optimizer
    assert "outer.lr=1 with outer.momentum=0" in late
    (mean,) = warnings_of(LocalSteps(30, 0, Outer(1.4, 0.9)), build("one_peer_exponential", 8))
    assert "from 1.36 on the mean of all workers diverges" in mean
    noloco = Outer(0.7, 0.9, nesterov=False, displacement="mixed")
    (mixed,) = warnings_of(LocalSteps(50, 0, noloco), build("random_matching", 8))
    assert "outer.momentum=0.9" in mixed
    assert warnings_of(LocalSteps(30, 10, Outer(0.4, 0.9)), build("one_peer_exponential", 8)) == []
    with pytest.warns(UserWarning, match="outer.lr=0.7"):
        simulate(nn.Linear(2, 2), 8, topology="ring", local_steps=30, outer=Outer(0.7, 0.9), merge_after=10)


def test_the_strength_of_mixing_follows_the_learning_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 4)
    assert Mixing(power=3).strength(optimizer, 0) == 1.0
    optimizer.step()
    schedule.step()
    schedule.step()
    assert Mixing(power=3, start=2).strength(optimizer, 1) == 1.0
    assert Mixing(power=3, start=2).strength(optimizer, 2) == pytest.approx(0.5**3)
    assert Mixing().strength(optimizer, 2) == 1.0


def test_windows_as_long_as_rounds_are_warned_of() -> None:
    for window, warned in ((4, True), (2, False)):
        (worker,) = simulate(nn.Linear(2, 1), 1, "decentralized", build("complete", 1), local_steps=4)
        optimizer = AccumAdamW(worker.parameters(), accumulation_steps=window)
        with warnings.catch_warnings(record=True) as caught:
            worker.attach(optimizer)
        assert ["accumulation_steps=4 with local_steps=4" in str(w.message) for w in caught] == [True] * warned


def strengths(schedule: Callable[[torch.optim.Optimizer], Any]) -> tuple[list[float], list[float]]:
    """Return 40 learning rates and strengths of mixing."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    schedule, rates, found = schedule(optimizer), [], []
    for t in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        found.append(Mixing(power=3).strength(optimizer, t))
        optimizer.step()
        schedule.step()
    return rates, found


@pytest.mark.filterwarnings("error")
def test_the_highest_learning_rate_of_a_cycle_is_known() -> None:
    rates, found = strengths(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2.0, total_steps=41))
    assert max(rates) > 10 * rates[0]
    assert found == pytest.approx([(rate / 2) ** 3 for rate in rates], abs=1e-6)


def test_a_learning_rate_above_its_start_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"learning rate is above the 0.1 .*\['max_lr'\]") as caught:
        _, found = strengths(lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=10))
    assert found == [1.0] * 40
    assert len({str(warning.message) for warning in caught}) == 1  # so that Python shows it once
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.warns(UserWarning, match="not that of a schedule"):
        assert Mixing(power=3).strength(optimizer, 0) == 1.0
    optimizer.param_groups[0]["max_lr"] = 1.0
    assert Mixing(power=3).strength(optimizer, 0) == 0.125
