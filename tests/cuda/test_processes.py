"""The branch for GPUs in real processes: streams are stand-ins, gloo carries messages, numbers are the simulator's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.parallel import Outer
from common.topology import build
from tests.cuda.device import idle_streams
from tests.distributed.comparison import assert_equal_to_simulator
from tests.distributed.scenarios import Scenario, in_process
from tests.distributed.sharded import in_sharded_process

LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)}
AER = Scenario(optimizer="fused_accumadamw", topology="aer", workers_per_host=2, steps=8)


def on_streams(rank: int, n: int, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the results of the scenarios on this rank, by the branch for GPUs."""
    with idle_streams():
        return in_process(rank, n, scenarios)


def sharded_on_streams(rank: int, n: int, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the results of the scenarios with shards on this rank, by the branch for GPUs."""
    with idle_streams():
        return in_sharded_process(rank, n, scenarios)


SCENARIOS = {
    "aer": AER,
    "staggered": replace(AER, phases="staggered"),
    "not fused": replace(AER, optimizer="momentum", clip=1.0),
    "between hosts": replace(AER, topology=build("ring", 4, 2, between_hosts=True), options={"bucket_mb": 0.0007}),
    "8 bits between hosts": replace(
        AER, topology=build("ring", 4, 2, between_hosts=True), options={"message_dtype": torch.int8}, steps=1
    ),
    "ring": replace(AER, topology="ring", workers_per_host=1),
    "idle": replace(AER, topology="one_peer_ring", workers_per_host=1, optimizer="adamw"),
    "complete": replace(AER, topology="complete"),
    "adapt then combine": replace(AER, optimizer="dmsgd", order="atc"),
    "local steps": replace(AER, optimizer="momentum", local=LOCAL),
    "local steps, staggered": replace(AER, optimizer="momentum", phases="staggered", local=LOCAL | {"fragments": 2}),
    "streaming": replace(AER, optimizer="momentum", topology="complete", local=LOCAL | {"fragments": 3}),
}


def test_numbers_are_those_of_the_simulator() -> None:
    scenarios = [SCENARIOS[name] for name in ("aer", "between hosts", "ring", "adapt then combine")]
    assert_equal_to_simulator(4, scenarios, run=on_streams)


@pytest.mark.slow
def test_numbers_are_those_of_the_simulator_in_every_scenario() -> None:
    scenarios = [scenario for name, scenario in SCENARIOS.items() if not name.startswith("8 bits")]
    assert_equal_to_simulator(4, scenarios, run=on_streams)
    assert_equal_to_simulator(3, [replace(SCENARIOS["idle"], steps=5)], run=on_streams)


def test_messages_of_8_bits_are_near() -> None:
    assert_equal_to_simulator(4, [SCENARIOS["8 bits between hosts"]], rtol=0.05, atol=0.02, run=on_streams)


# With an option, so that bytes are not compared: the simulator has no shards.
SHARDED = Scenario(topology="one_peer_exponential", ranks_per_worker=2, steps=8, options={"timeout_s": 30})


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "fused_accumadamw"])
def test_shards_are_those_of_the_simulator(optimizer: str) -> None:
    assert_equal_to_simulator(4, [replace(SHARDED, optimizer=optimizer)], run=sharded_on_streams)
