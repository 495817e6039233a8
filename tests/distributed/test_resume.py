"""Stopping after 10 updates and going on in new objects changes no bit of what 20 updates give."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.parallel import Outer
from common.topology import build
from tests.distributed import models
from tests.distributed.comparison import assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, Training, in_process, real, snapshot
from tests.naming import case

HALF = 10  # not a multiple of AccumAdamW's window of 4, nor of the topologies' periods
BASE = Scenario(optimizer="accumadamw", steps=2 * HALF)
OUTER = Outer(lr=0.4, momentum=0.9)
SCENARIOS = [
    replace(BASE, topology="one_peer_exponential"),
    replace(BASE, topology="aer", workers_per_host=2, model=models.conv_bn, inputs=(3, 6, 6)),
    replace(BASE, topology="aer", order="atc", optimizer="dmsgd"),
    replace(BASE, topology="one_peer_exponential", order="atc", optimizer="dmsgd"),
    replace(BASE, topology="one_peer_exponential", order="atc", optimizer="qg_dmsgd"),
    replace(BASE, topology="random_matching", optimizer="momentum+adam"),
    replace(BASE, topology="aer", workers_per_host=2, phases="staggered", optimizer="fused_accumadamw"),
    replace(BASE, topology="ring", workers_per_host=2, options={"message_dtype": torch.int8}),
    replace(BASE, topology="aer", workers_per_host=2, options={"message_dtype": torch.int8}),
]
# After 10 updates: in flight in the middle of a round, two fragments of three in flight, merged, launched just now.
LOCAL = [
    replace(BASE, topology="one_peer_exponential", local={"local_steps": 4, "merge_after": 3, "outer": OUTER}),
    # Two of the fragments are in flight, and the first of them was launched last: relaunched before the others it would
    # wait for messages between hosts that are queued behind it.
    replace(
        BASE,
        topology=build("ring", 4, 2, between_hosts=True),
        local={"local_steps": 6, "merge_after": 3, "outer": OUTER, "fragments": 3},
        options={"bucket_mb": 0.0001},
    ),
    replace(BASE, topology="random_matching", local={"local_steps": 4, "merge_after": 1, "outer": OUTER}),
    replace(BASE, topology="aer", local={"local_steps": 5, "merge_after": 5, "outer": OUTER}),
    replace(
        BASE,
        topology="ring",
        workers_per_host=2,
        local={"local_steps": 6, "merge_after": 2, "outer": OUTER, "fragments": 3},
    ),
    replace(BASE, topology="complete", order="atc", local={"local_steps": 4, "local_steps_from": 3, "outer": OUTER}),
    replace(
        BASE,
        topology="ring",
        local={"local_steps": 4, "merge_after": 3, "outer": OUTER},
        options={"message_dtype": torch.int8},
    ),
]
# DDP lays out its buckets anew after its first backward, and with that the order in which a ring sums: only of two
# ranks a sum is the same bits in any order.
ALLREDUCE = [
    replace(BASE, method="allreduce", optimizer="adamw"),
    replace(BASE, method="allreduce", optimizer="adamw", options={"hook": "powersgd", "powersgd_from": 3}),
]


def interrupted(rank: int, scenario: Scenario) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the end of a training that goes back to its middle and on from there, and a checkpoint of the middle."""
    training = real(rank, scenario).run(range(HALF))
    checkpoint = copy.deepcopy(
        {
            "model": training.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in training.optimizers[0]],
            "clock": training.model.clock,
            "communication": training.model.communication_state(),
            "bytes_sent": training.model.counters.bytes_sent,
        }
    )
    training.run(range(50, 53))
    state = snapshot(load(training, copy.deepcopy(checkpoint)).run(range(HALF, 2 * HALF)).model)
    training.model.close()
    return state, checkpoint


def resumed(rank: int, scenario: Scenario, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the end of a training that goes on in new objects from a checkpoint."""
    training = real(rank, scenario)
    communication = checkpoint["communication"]
    if "powersgd_passes" in communication:
        with pytest.raises(RuntimeError, match="after 10 backward passes: expected one forward, backward"):
            training.model.load_communication_state(communication)
    if training.model.settles_in_first_backward:  # PowerSGD remembers by bucket; the loop rehearses a step likewise
        training.backward(0)
        training.model.zero_grad()
    load(training, checkpoint).run(range(HALF, 2 * HALF))
    bytes_sent = checkpoint["bytes_sent"] + training.model.counters.bytes_sent
    result = {"state": snapshot(training.model), "clock": training.model.clock, "bytes_sent": bytes_sent}
    if "powersgd_passes" in communication:
        before = checkpoint | {"communication": {"powersgd_passes": torch.tensor(2)}}  # before it begins
        assert len(load(training, copy.deepcopy(before)).model.communication_state()) == 1
        assert_same(*(snapshot(load(training, copy.deepcopy(before)).run(range(4)).model) for _ in range(2)))
    training.model.close()
    return result


def load(training: Training, checkpoint: dict[str, Any]) -> Training:
    training.model.load_state_dict(checkpoint["model"])
    for optimizer, state in zip(training.optimizers[0], checkpoint["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    training.model.load_clock(checkpoint["clock"])
    training.model.load_communication_state(checkpoint["communication"])
    return training


def all_ways(rank: int, n: int, scenarios: list[Scenario]) -> list[tuple[dict, dict, dict]]:
    """Return the ends of each scenario: uninterrupted, rewound, resumed."""
    results = []
    for scenario, uninterrupted in zip(scenarios, in_process(rank, n, scenarios), strict=True):
        rewound, checkpoint = interrupted(rank, scenario)
        results.append((uninterrupted, rewound, resumed(rank, scenario, checkpoint)))
    return results


@pytest.mark.parametrize(
    ("n", "scenarios"),
    [
        pytest.param(4, SCENARIOS[::2], id="gossip"),
        pytest.param(4, SCENARIOS[1::2], id="more gossip", marks=pytest.mark.slow),
        pytest.param(2, ALLREDUCE, id="allreduce"),
        pytest.param(4, LOCAL[:3], id="local steps"),
        pytest.param(4, LOCAL[3:], id="more local steps", marks=pytest.mark.slow),
    ],
)
def test_resuming_and_rewinding_are_exact(n: int, scenarios: list[Scenario]) -> None:
    for rank, results in enumerate(run_processes(all_ways, n, scenarios)):
        for scenario, (whole, rewound, resumed) in zip(scenarios, results, strict=True):
            with case("rank", rank, scenario):
                assert_same(resumed["state"], whole["state"], "resumed")
                assert resumed["clock"] == 2 * HALF
                assert resumed["bytes_sent"] == whole["counters"].bytes_sent
                assert_same(rewound, whole["state"], "rewound")


def begun_anew(rank: int, n: int, scenarios: list[Scenario]) -> list[list[dict[str, np.ndarray]]]:
    """Return the ends of two trainings from the same start in one wrapper."""
    ends = []
    for scenario in scenarios:
        training, ends = real(rank, scenario), [*ends, []]
        start = copy.deepcopy(training.model.state_dict())
        for _ in range(2):
            training.model.load_state_dict(start)
            training.model.load_clock(0)
            ends[-1].append(snapshot(training.run(range(HALF)).model))
        training.model.close()
    return ends


def test_going_back_to_the_start_forgets_outer_momenta_and_errors_of_messages() -> None:
    rounded = replace(BASE, topology="ring", options={"message_dtype": torch.int8})
    for results in run_processes(begun_anew, 2, [replace(s, optimizer="sgd") for s in (rounded, LOCAL[0])]):
        for first, second in results:
            assert_same(second, first, "begun anew")
