"""Workers whose ranks hold shards (FSDP2) train as workers whose ranks hold whole replicas, bit for bit, and as the
simulator says: a sharded worker is a worker."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from common.parallel import Outer
from tests.distributed import models
from tests.distributed.comparison import ATOL, RTOL, assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario
from tests.distributed.sharded import Statistics, Uneven, in_both_ways
from tests.naming import case

BASE = Scenario(topology="one_peer_exponential", ranks_per_worker=2, steps=10)
PLAIN = ("sgd", "momentum", "adamw", "accumadamw")
LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)}
SCENARIOS = [
    *(replace(BASE, optimizer=name) for name in (*PLAIN, "fused_accumadamw", "dmsgd_local")),
    replace(BASE, optimizer="dmsgd", order="atc"),
    replace(BASE, optimizer="qg_dmsgd", order="atc"),
    replace(BASE, optimizer="adamw+momentum"),
    replace(BASE, optimizer="adamw", accumulate=3),
    replace(BASE, optimizer="fused_accumadamw", accumulate=2),
    replace(BASE, optimizer="adamw", local=LOCAL),
    replace(BASE, optimizer="adamw", model=models.Tied),
    replace(BASE, optimizer="accumadamw", model=models.Checkpointed),
    replace(BASE, optimizer="adamw", model=models.frozen),
    replace(BASE, optimizer="momentum", model=models.MixedDtypes),
    replace(BASE, optimizer="momentum", model=Statistics),
    replace(BASE, optimizer="adamw", options={"message_dtype": torch.bfloat16}),
    replace(BASE, optimizer="adamw", options={"bucket_mb": 0.0002}),
]
# One of everything that shards change, for the fast tier.
FEW = [
    replace(BASE, optimizer="adamw"),
    replace(BASE, optimizer="accumadamw", accumulate=2),
    replace(BASE, optimizer="momentum", model=models.Tied, local=LOCAL),
    replace(BASE, optimizer="accumadamw", model=Uneven, steps=4),
]
LARGE = [replace(BASE, model=Uneven, optimizer="fused_accumadamw", steps=4)]
# Of every transport.
WIDE = [replace(BASE, topology=t, optimizer="fused_accumadamw") for t in ("aer", "ring", "complete")]


def assert_equal_to_whole(n: int, scenarios: Sequence[Scenario], rtol: float = 0, atol: float = 0) -> None:
    """Check parameters and buffers, bit for bit unless tolerances are given; mean models are sums in another order."""
    for rank, results in enumerate(run_processes(in_both_ways, n, scenarios)):
        for scenario, (shards, whole) in zip(scenarios, results, strict=True):
            with case("rank", rank, scenario):
                assert_same(shards["state"], whole["state"], "state", rtol, atol)
                assert_same(shards["mean"], whole["mean"], "mean", RTOL, ATOL)
                assert shards["distance"] == pytest.approx(whole["distance"], rel=1e-5, abs=1e-6)
                assert shards["counters"].rounds == whole["counters"].rounds


def test_equals_whole_replicas_bit_for_bit() -> None:
    assert_equal_to_whole(4, [replace(scenario, steps=min(scenario.steps, 8)) for scenario in FEW])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "scenarios"), [(2, FEW), (4, [*SCENARIOS, *LARGE, *WIDE])], ids=["1 worker", "2 workers"]
)
def test_every_scenario_equals_whole_replicas_bit_for_bit(n: int, scenarios: Sequence[Scenario]) -> None:
    assert_equal_to_whole(n, scenarios)


def test_equals_whole_replicas_where_norms_are_summed_in_another_order() -> None:
    assert_equal_to_whole(4, [replace(BASE, optimizer="momentum", accumulate=2, clip=0.1)], RTOL, ATOL)


class Halves(nn.Module):
    """2,560 bytes of parameters, each half of which needs no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())[:, :3]


def test_a_rank_sends_its_part_of_the_bytes() -> None:
    bytes_per_round = {None: 1280, torch.bfloat16: 640, torch.int8: 320 + 2 * 4}  # by the dtype of messages
    halves = replace(BASE, model=Halves, inputs=(16,), steps=4)
    scenarios = [replace(halves, options={"bucket_mb": 0.0007, "message_dtype": dtype}) for dtype in bytes_per_round]
    for results in run_processes(in_both_ways, 4, scenarios):
        for (shards, whole), expected in zip(results, bytes_per_round.values(), strict=True):
            assert shards["counters"].bytes_sent == 4 * expected
            assert whole["counters"].bytes_sent == pytest.approx(2 * shards["counters"].bytes_sent, rel=0.01)
