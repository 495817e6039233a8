"""An inf on one rank skips the step on all ranks: as if that step had never been."""

from dataclasses import replace

import pytest
import torch

from common.parallel import GradScaler
from tests.distributed.comparison import ATOL, RTOL, assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, real, simulated, snapshot

STEPS, OVERFLOWS, WHERE = 8, (0, 3), 1  # steps in which rank WHERE gets an inf
BASE = Scenario(topology="one_peer_exponential", clip=0.1, optimizer="momentum")
SCENARIOS = [
    BASE,
    replace(BASE, optimizer="accumadam", clip=None),
    replace(BASE, optimizer="fused_sgd", topology="complete"),
    replace(BASE, optimizer="fused_adam", clip=None),
    replace(BASE, optimizer="dmsgd", order="atc"),
    replace(BASE, optimizer="fused_sgd", method="allreduce"),
    replace(BASE, optimizer="momentum+fused_adam", clip=None),
]


def scaled(rank: int, n: int, scenarios: list[Scenario]) -> list[dict]:
    results = []
    for scenario in scenarios:
        training = real(rank, replace(scenario, clip=None))
        model, optimizers = training.model, training.optimizers[0]
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scales, clocks = [], []
        for step in range(STEPS):
            training.backward(step, scaler.scale)
            if step in OVERFLOWS and rank == WHERE:
                next(reversed(list(model.parameters()))).grad.view(-1)[0] = torch.inf
            if scenario.clip is not None:
                scaler.unscale_(optimizers[0])
                torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
            if len(optimizers) > 1:
                finite = scaler.all_finite(optimizers)
                assert finite is (step not in OVERFLOWS)
                for optimizer in optimizers if finite else ():
                    optimizer.step()
            else:
                scaler.step(optimizers[0])
            scaler.update()
            model.zero_grad()
            scales.append(scaler.get_scale())
            clocks.append(model.clock)
        results.append({"state": snapshot(model), "scales": scales, "clocks": clocks, "rounds": model.counters.rounds})
        model.close()
    return results


@pytest.fixture(scope="module")
def outcome() -> list[list[dict]]:
    """Results by scenario, then rank."""
    return [list(ranks) for ranks in zip(*run_processes(scaled, 3, SCENARIOS), strict=True)]


@pytest.mark.parametrize("index", range(len(SCENARIOS)))
def test_all_ranks_skip_alike(outcome: list[list[dict]], index: int) -> None:
    for result in outcome[index]:
        # 2^10; halved in steps 0 and 3; doubled after three good steps in a row
        assert result["scales"] == [2.0**k for k in (9, 9, 9, 8, 8, 8, 9, 9)]
        assert result["clocks"] == [0, 1, 2, 2, 3, 4, 5, 6]
        assert result["rounds"] == STEPS - len(OVERFLOWS)


@pytest.mark.parametrize("index", range(len(SCENARIOS)))
def test_a_skipped_step_never_happened(outcome: list[list[dict]], index: int) -> None:
    """Scales are powers of two, so scaling changes no bit."""
    training = simulated(3, SCENARIOS[index]).run(step for step in range(STEPS) if step not in OVERFLOWS)
    for result, expected in zip(outcome[index], training.results(), strict=True):
        assert_same(result["state"], expected["state"], rtol=RTOL, atol=ATOL)
