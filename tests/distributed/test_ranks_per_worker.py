"""Two ranks that share a replica: n / 2 workers, whose gradient is the mean over both ranks' batches."""

from dataclasses import replace

import pytest

from common.parallel import Outer
from tests.distributed import models
from tests.distributed.comparison import assert_equal_to_simulator, assert_same
from tests.distributed.scenarios import Scenario

BASE = Scenario(topology="one_peer_exponential", optimizer="momentum", ranks_per_worker=2, steps=12)
LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)}
SCENARIOS = [
    replace(BASE, accumulate=2, clip=0.1),
    replace(BASE, topology="complete", optimizer="accumadamw"),
    replace(BASE, optimizer="dmsgd", order="atc"),
    replace(BASE, model=models.frozen, optimizer="momentum+adamw"),
    replace(BASE, model=models.Unused, options={"find_unused_parameters": True}),
    replace(BASE, local=LOCAL),
]
HOSTS = replace(BASE, topology="aer", workers_per_host=2)  # two workers of two ranks on each host


@pytest.mark.parametrize(
    ("n", "scenarios"),
    [
        (2, [SCENARIOS[0], SCENARIOS[-1]]),
        (4, SCENARIOS),
        pytest.param(8, [SCENARIOS[0], HOSTS, replace(HOSTS, local=LOCAL)], marks=pytest.mark.slow),
    ],
)
def test_equals_a_simulation_of_half_as_many_workers(n: int, scenarios: list[Scenario]) -> None:
    real = assert_equal_to_simulator(n, scenarios)
    for rank in range(0, n, 2):
        for one, other in zip(real[rank], real[rank + 1], strict=True):
            assert_same(one["state"], other["state"])
            assert one["counters"].bytes_sent == other["counters"].bytes_sent
