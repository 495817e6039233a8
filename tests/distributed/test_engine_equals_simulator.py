"""Every topology and every optimizer: the engine does what W(t) says. See `test_matrix_form` for 5 and 8 workers."""

from itertools import cycle

import pytest

from tests.distributed.comparison import assert_equal_to_simulator
from tests.distributed.scenarios import Scenario

TOPOLOGIES = ("complete", "ring", "one_peer_ring", "static_exponential", "one_peer_exponential")
TOPOLOGIES += ("torus", "star", "random_matching", "base_k", "hypercube", "aer")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "accumadam", "accumadamw")
STEPS = 12  # several windows, and the longest period


@pytest.mark.parametrize("n", [2, 4])
def test_every_topology_and_every_optimizer(n: int) -> None:
    """Each topology with one of them, in turn."""
    pairs = zip(TOPOLOGIES, cycle(OPTIMIZERS), strict=False)
    assert_equal_to_simulator(n, [Scenario(topology=t, optimizer=name, steps=STEPS) for t, name in pairs])
