"""Stopping after 10 updates and going on in new objects changes no bit of what 20 updates give."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed import models
from tests.distributed.comparison import assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, in_process, real, snapshot

HALF = 10  # not a multiple of AccumAdamW's window of 4, nor of the topologies' periods
BASE = Scenario(optimizer="accumadamw", steps=2 * HALF)
SCENARIOS = [
    replace(BASE, topology="one_peer_exponential"),
    replace(BASE, topology="aer", workers_per_host=2, model=models.conv_bn, inputs=(3, 6, 6)),
    replace(BASE, topology="aer", order="atc", optimizer="dmsgd"),
    replace(BASE, topology="one_peer_exponential", order="atc", optimizer="dmsgd"),
    replace(BASE, topology="random_matching", optimizer="momentum+adam"),
    replace(BASE, topology="aer", workers_per_host=2, phases="staggered", optimizer="fused_accumadamw"),
    replace(BASE, topology="ring", options={"message_dtype": torch.int8}),
    replace(BASE, topology="aer", workers_per_host=2, options={"message_dtype": torch.int8}),
]
# DDP lays out its buckets anew after its first backward, and with that the order in which a ring sums: only of two
# ranks a sum is the same bits in any order.
ALLREDUCE = replace(BASE, method="allreduce", optimizer="adamw")


def saved(rank: int, scenario: Scenario) -> dict[str, Any]:
    """What a checkpoint of this rank holds; no message is in it."""
    training = real(rank, scenario).run(range(HALF))
    checkpoint = {
        "model": {name: tensor.clone() for name, tensor in training.model.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in training.optimizers[0]],
        "clock": training.model.clock,
        "communication": [tensor.clone() for tensor in training.model.communication_state()],
        "bytes_sent": training.model.counters.bytes_sent,
    }
    training.model.close()
    return checkpoint


def resumed(rank: int, n: int, scenarios: list[Scenario]) -> list[dict]:
    results = []
    for scenario in scenarios:
        checkpoint = saved(rank, scenario)
        training = real(rank, scenario)
        training.model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(training.optimizers[0], checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        training.model.load_clock(checkpoint["clock"])
        training.model.load_communication_state(checkpoint["communication"])
        training.run(range(HALF, 2 * HALF))
        bytes_sent = checkpoint["bytes_sent"] + training.model.counters.bytes_sent
        results.append({"state": snapshot(training.model), "clock": training.model.clock, "bytes_sent": bytes_sent})
        training.model.close()
    return results


def rewound(rank: int, n: int, scenarios: list[Scenario]) -> list[dict]:
    """Back to the middle with the same objects, and on from there."""
    results = []
    for scenario in scenarios:
        training = real(rank, scenario).run(range(HALF))
        model = copy.deepcopy(training.model.state_dict())
        communication = copy.deepcopy(training.model.communication_state())
        states = copy.deepcopy([optimizer.state_dict() for optimizer in training.optimizers[0]])
        training.run(range(50, 53))
        training.model.load_state_dict(model)
        for optimizer, state in zip(training.optimizers[0], states, strict=True):
            optimizer.load_state_dict(state)
        training.model.load_clock(HALF)
        training.model.load_communication_state(communication)
        results.append(snapshot(training.run(range(HALF, 2 * HALF)).model))
        training.model.close()
    return results


def test_rewinding_is_exact() -> None:
    uninterrupted = run_processes(in_process, 4, SCENARIOS)
    for rank, states in enumerate(run_processes(rewound, 4, SCENARIOS)):
        for scenario, state, expected in zip(SCENARIOS, states, uninterrupted[rank], strict=True):
            assert_same(state, expected["state"], str(scenario))


@pytest.mark.parametrize(("n", "scenarios"), [(4, SCENARIOS), (2, [ALLREDUCE])])
def test_resume_is_exact(n: int, scenarios: list[Scenario]) -> None:
    uninterrupted = run_processes(in_process, n, scenarios)
    for rank, results in enumerate(run_processes(resumed, n, scenarios)):
        for scenario, result, expected in zip(scenarios, results, uninterrupted[rank], strict=True):
            assert_same(result["state"], expected["state"], str(scenario))
            assert result["clock"] == 2 * HALF
            assert result["bytes_sent"] == expected["counters"].bytes_sent
