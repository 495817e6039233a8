"""Every topology and every optimizer, for every small number of workers: the engine does what W(t) says."""

from itertools import cycle

import pytest

from tests.distributed.comparison import assert_equal_to_simulator
from tests.distributed.scenarios import Scenario

ALWAYS = ("complete", "ring", "one_peer_ring", "static_exponential", "one_peer_exponential")
ALWAYS += ("torus", "star", "random_matching", "base_k")
POWERS_OF_TWO = ("hypercube", "aer")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "accumadam", "accumadamw")
STEPS = 12  # several windows, and the longest period


def topologies(n: int) -> tuple[str, ...]:
    return ALWAYS + POWERS_OF_TWO * (n.bit_count() == 1)


@pytest.mark.parametrize("n", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_topology_and_every_optimizer(n: int) -> None:
    """Each topology with one of them, in turn."""
    pairs = zip(topologies(n), cycle(OPTIMIZERS[:: 1 if n % 2 else -1]), strict=False)
    assert_equal_to_simulator(n, [Scenario(topology=t, optimizer=name, steps=STEPS) for t, name in pairs])
