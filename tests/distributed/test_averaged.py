"""The mean model: for a while (`averaged()`, nothing is left of it) and for good (`average_()`)."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from common.parallel import DecentralizedDataParallel, Outer
from tests.distributed import models
from tests.distributed.comparison import ATOL, RTOL, assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, in_process, real, simulated, snapshot

CONV = Scenario(model=models.conv_bn, inputs=(3, 6, 6), optimizer="momentum", topology="one_peer_exponential", steps=6)
DMSGD = replace(CONV, optimizer="dmsgd", order="atc")
MIXED = Scenario(model=models.MixedDtypes, optimizer="accumadam", topology="complete", steps=6)
ALLREDUCE = replace(CONV, method="allreduce")
# In the middle of a round: the mean is that of the inner parameters, for good that of anchors and momenta too.
LOCAL = replace(CONV, local={"local_steps": 4, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)})
SCENARIOS = [CONV, DMSGD, MIXED, LOCAL, ALLREDUCE]


def disturbed(rank: int, n: int, scenarios: list[Scenario]) -> list[dict]:
    """Train; look at the mean model before the start, between backward and step, and between steps; go on."""
    results = []
    for scenario in scenarios:
        training = real(rank, scenario)
        model = training.model
        with model.averaged():
            pass
        for step in range(scenario.steps):
            training.backward(step)
            before = snapshot(model)
            with model.averaged() as module:
                inside = snapshot(module)
            after = snapshot(model)
            training.update()
            with contextlib.suppress(ZeroDivisionError), model.averaged() as module:
                module.eval()(scenario.batch(rank, 0)[0])
                raise ZeroDivisionError
            model.train()
        distances = [model.consensus_distance() for _ in range(2)]
        state = snapshot(model)
        bytes_sent = model.counters.bytes_sent
        model.average_()
        persistent = snapshot(model)
        training.run(range(scenario.steps, scenario.steps + 3))  # goes on from there
        results.append(
            {
                "before": before,
                "inside": inside,
                "after": after,
                "state": state,
                "distances": distances,
                "persistent": persistent,
                "bytes_sent": bytes_sent,
                "continued": snapshot(model),
            }
        )
        model.close()
    return results


class Odd(nn.Linear):
    """Has a constant whose sum overflows, and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        self.register_buffer("lowest", torch.tensor(torch.finfo(torch.float32).min))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


def evaluated(rank: int, n: int) -> None:
    model = DecentralizedDataParallel(Odd(), "ring")
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model.drain()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.module.weight.fill_(rank)
        own = model(torch.ones(1, 2)).float()
        with model.averaged() as mean:
            inside = mean(torch.ones(1, 2)).float()
            assert mean.lowest == torch.finfo(torch.float32).min
            assert mean.seen == 2
        after = model(torch.ones(1, 2)).float()
    torch.testing.assert_close((own, inside, after), tuple(torch.full((1, 1), 2.0 * x) for x in (rank, 0.5, rank)))
    assert model.module.seen == 2
    model.close()


def test_inside_an_autocast_with_odd_buffers() -> None:
    run_processes(evaluated, 2)


def flat(state: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in state.values()])


@pytest.fixture(scope="module")
def outcome() -> list[list[dict]]:
    """Results by scenario, then rank."""
    return [list(ranks) for ranks in zip(*run_processes(disturbed, 3, SCENARIOS), strict=True)]


def assert_mean(means: list[dict], states: list[dict]) -> None:
    """Parameters and statistics are numpy's mean; what counts batches is local."""
    for rank, mean in enumerate(means):
        for name, value in mean.items():
            if name.endswith("num_batches_tracked"):
                np.testing.assert_array_equal(value, states[rank][name])
            else:
                expected = np.mean([state[name] for state in states], axis=0)
                tolerance = 2**-8 if name.startswith(("middle", "statistic")) else 1e-6  # bfloat16 is rounded once
                np.testing.assert_allclose(value, expected, rtol=tolerance, atol=1e-7, err_msg=name)
                np.testing.assert_array_equal(value, means[0][name])


@pytest.mark.parametrize("index", range(len(SCENARIOS)))
def test_inside_is_the_mean_and_outside_nothing_is_left(outcome: list[list[dict]], index: int) -> None:
    ranks = outcome[index]
    assert_mean([rank["inside"] for rank in ranks], [rank["before"] for rank in ranks])
    for rank in ranks:
        assert_same(rank["after"], rank["before"])


def test_training_goes_on_as_if_nobody_had_looked(outcome: list[list[dict]]) -> None:
    undisturbed = run_processes(in_process, 3, SCENARIOS)
    for index, ranks in enumerate(outcome):
        for rank, result in enumerate(ranks):
            expected = undisturbed[rank][index]
            assert_same(result["state"], expected["state"], str(SCENARIOS[index]))
            if SCENARIOS[index].method == "decentralized":  # nothing was sent twice
                assert result["bytes_sent"] == expected["counters"].bytes_sent


@pytest.mark.parametrize("index", range(len(SCENARIOS)))
def test_average_for_good(outcome: list[list[dict]], index: int) -> None:
    ranks = outcome[index]
    assert_mean([rank["persistent"] for rank in ranks], [rank["state"] for rank in ranks])
    # What was in flight is not merged into the mean later.
    scenario = SCENARIOS[index]
    training = simulated(3, scenario).run(range(scenario.steps))
    training.model.average_()
    training.run(range(scenario.steps, scenario.steps + 3))
    tolerances = (2**-6, 2**-8) if scenario is MIXED else (RTOL, ATOL)
    for rank, expected in zip(ranks, training.results(), strict=True):
        assert_same(rank["continued"], expected["state"], "", *tolerances)


@pytest.mark.parametrize("index", range(len(SCENARIOS)))
def test_consensus_distance(outcome: list[list[dict]], index: int) -> None:
    names = dict(SCENARIOS[index].build().named_parameters())
    X = np.array([flat({name: rank["state"][name] for name in names}) for rank in outcome[index]])
    expected = np.sqrt(((X - X.mean(0)) ** 2).sum(1).mean())
    distances = {distance for rank in outcome[index] for distance in rank["distances"]}
    assert len(distances) == 1  # equal on all ranks, again and again
    assert distances.pop() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (expected == 0) == (SCENARIOS[index].method == "allreduce")


def refusals(rank: int, n: int) -> None:
    for scenario in (CONV, ALLREDUCE):
        training = real(rank, scenario)
        model = training.run(range(2)).model
        with model.averaged():
            with pytest.raises(RuntimeError, match=r"optimizer.step\(\) inside"):
                training.optimizer.step()
            with pytest.raises(RuntimeError, match="training forward inside"):
                scenario.loss(model, rank, 2)
            with torch.no_grad():
                scenario.loss(model, rank, 2)
        training.run(range(2, 4))
        assert model.clock == 4


def test_training_inside_is_refused() -> None:
    run_processes(refusals, 2)
