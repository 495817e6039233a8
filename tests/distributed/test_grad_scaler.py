"""Loss scaling: under gossip a worker that overflows takes a zero gradient, under all-reduce all skip the step."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.options import GossipOptions
from common.parallel import GradScaler
from common.parallel.checks import resolve_topology
from tests.distributed.comparison import ATOL, RTOL, assert_equal_to_simulator, assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, in_process, real, simulated, snapshot
from tests.naming import case

OVERFLOWS = {(1, 0): math.inf, (0, 3): math.nan, (1, 3): -math.inf, (2, 4): math.nan, (1, 9): math.inf}  # rank, step
OVERFLOWS |= {(3, 7): math.nan, (3, 8): math.inf}
BASE = Scenario(topology="one_peer_exponential", optimizer="momentum", steps=12, scaler=GradScaler, overflows=OVERFLOWS)


@pytest.mark.parametrize(
    ("n", "scenario"),
    [
        (4, replace(BASE, optimizer="fused_accumadamw")),
        (5, replace(BASE, topology="ring", clip=0.1, accumulate=2)),
        (6, replace(BASE, topology="random_matching", optimizer="momentum+accumadamw")),
        (8, replace(BASE, topology="aer", workers_per_host=2, optimizer="accumadamw", clip=0.1)),
    ],
)
@pytest.mark.usefixtures("eager_kernel")
def test_the_trajectory_is_that_of_zero_gradients(n: int, scenario: Scenario) -> None:
    training = simulated(n, scenario).run(range(scenario.steps))
    for worker, (model, expected) in enumerate(zip(training.models, replay(n, scenario), strict=True)):
        with case("worker", worker):
            assert_same(snapshot(model), expected, rtol=RTOL, atol=ATOL)
            assert model.clock == scenario.steps
            scales = [scales[worker] for scales in training.scales]
            assert scales == expected_scales({step for rank, step in OVERFLOWS if rank == worker})
            state = [t for optimizer in training.optimizers[worker] for t in optimizer.state_dict()["state"].values()]
            assert all(torch.as_tensor(value).isfinite().all() for entry in state for value in entry.values())


def replay(n: int, scenario: Scenario) -> list[dict[str, np.ndarray]]:
    """Compute x_i <- sum_j W_ij x_j + d_i in float64, without scaling, with the gradients zero that would overflow."""
    models = [scenario.build().double() for _ in range(n)]
    plain = replace(scenario, optimizer=scenario.optimizer.removeprefix("fused_"))
    optimizers = [plain.optimizers(model) for model in models]
    topology = resolve_topology(scenario.topology, GossipOptions(), n, scenario.workers_per_host)
    for step in range(scenario.steps):
        for rank, model in enumerate(models):
            for micro in range(scenario.accumulate):
                loss = scenario.loss(lambda x, model=model: model(x.double()), rank, step, micro)
                (loss / scenario.accumulate).backward()
            if (rank, step) in scenario.overflows:
                optimizers[rank][-1].zero_grad(set_to_none=False)
            if scenario.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mixed = torch.einsum("ij,j...->i...", torch.tensor(topology.matrix(step)), torch.stack(parameters))
                for parameter, value in zip(parameters, mixed, strict=True):
                    parameter.copy_(value)
        for optimizer in (optimizer for of_worker in optimizers for optimizer in of_worker):
            optimizer.step()
            optimizer.zero_grad()
    return [snapshot(model) for model in models]


def expected_scales(overflows: set[int]) -> list[float]:
    """Return the scales after each step: halved by an overflow, doubled by three good steps in a row."""
    scale, good, scales = 2.0**10, 0, []
    for step in range(BASE.steps):
        good = 0 if step in overflows else good + 1
        if step in overflows:
            scale /= 2
        elif good == 3:
            scale, good = 2 * scale, 0
        scales.append(scale)
    return scales


@pytest.mark.slow
def test_processes_equal_the_simulator() -> None:
    assert_equal_to_simulator(
        4,
        [
            BASE,
            replace(BASE, optimizer="accumadamw", topology="ring", clip=0.1, accumulate=2),
            replace(BASE, optimizer="fused_adam", topology="complete"),
            replace(BASE, optimizer="dmsgd", order="atc"),
            replace(BASE, optimizer="momentum+fused_sgd", phases="staggered"),
            replace(BASE, optimizer="momentum+accumadamw", method="allreduce"),
        ],
    )


def test_ranks_that_share_a_replica_keep_one_scale() -> None:
    shared = replace(BASE, ranks_per_worker=2, overflows={(1, 0): math.inf, (2, 3): math.nan})
    real = assert_equal_to_simulator(4, [replace(shared, clip=0.1), replace(shared, optimizer="fused_adam")])
    for scenario in range(2):
        scales = [ranks[scenario]["scales"] for ranks in real]
        assert scales == [expected_scales({0})] * 2 + [expected_scales({3})] * 2


OVERFLOWN = (0, 3)
ALLREDUCE = replace(
    BASE,
    method="allreduce",
    topology="complete",
    scaler=torch.amp.GradScaler,
    overflows={(1, step): math.inf for step in OVERFLOWN},
)
SKIPPING = [
    replace(ALLREDUCE, clip=0.1),
    replace(ALLREDUCE, optimizer="fused_adam"),
    replace(ALLREDUCE, optimizer="accumadamw"),
]


def with_torchs_scaler(rank: int, n: int) -> list[dict]:
    return in_process(rank, n, SKIPPING)


def test_under_allreduce_torchs_scaler_skips_alike() -> None:
    """As if the step had never been, on real and simulated workers. Scales are powers of two, so they change no bit."""
    real = run_processes(with_torchs_scaler, 3)
    for index, scenario in enumerate(SKIPPING):
        skipping = simulated(3, scenario).run(range(scenario.steps)).results()
        without = simulated(3, replace(scenario, scaler=None, overflows={}))
        without.run(step for step in range(scenario.steps) if step not in OVERFLOWN)
        for rank, expected in enumerate(without.results()):
            with case("rank", rank, scenario):
                assert_same(skipping[rank]["state"], expected["state"])
                assert_same(real[rank][index]["state"], expected["state"], rtol=RTOL, atol=ATOL)
                assert real[rank][index]["scales"] == skipping[rank]["scales"] == expected_scales(set(OVERFLOWN))


def without_collectives(rank: int, n: int) -> list[list[float]]:
    """Train where gossip itself only sends and receives; from the second step on any collective raises."""
    training = real(rank, BASE).run(range(1))
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
    with mock.patch.multiple(dist, **dict.fromkeys(names)):
        return training.run(range(1, BASE.steps)).scales


def test_the_scaler_calls_no_collective() -> None:
    scales = run_processes(without_collectives, 2)
    assert scales == [[[scale] for scale in expected_scales(steps)] for steps in ({3}, {0, 3, 9})]
