"""Every topology with every optimizer, for every small number of workers: the engine does what W(t) says."""

from dataclasses import replace

import pytest

from tests.distributed.comparison import assert_equal_to_simulator
from tests.distributed.scenarios import Scenario

ALWAYS = ("complete", "ring", "one_peer_ring", "static_exponential", "one_peer_exponential")
ALWAYS += ("torus", "star", "random_matching", "base_k")
POWERS_OF_TWO = ("hypercube", "aer")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "accumadam", "accumadamw")


@pytest.mark.parametrize("n", [1, 2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 8))])
def test_every_topology_and_optimizer(n: int) -> None:
    topologies = ALWAYS + POWERS_OF_TWO * (n.bit_count() == 1)
    scenarios = [replace(Scenario(), topology=t, optimizer=name) for t in topologies for name in OPTIMIZERS]
    assert_equal_to_simulator(n, scenarios)
