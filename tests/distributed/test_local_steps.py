"""Local steps: processes, the simulator and plain numpy compute the same rule."""

import numpy as np
import pytest

from tests.distributed.local_steps import Case, cases, in_numpy, in_simulation, on_rank
from tests.distributed.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:outer.lr")

TOPOLOGIES = {
    1: ["complete"],
    2: ["complete", "one_peer_exponential"],
    3: ["complete", "ring", "random_matching"],
    4: ["complete", "ring", "one_peer_exponential", "random_matching", "aer"],
    5: ["complete", "ring", "one_peer_exponential", "random_matching", "base_k"],
}


def chosen(n: int) -> list[Case]:
    """Return every topology with every method; of many workers with each third."""
    return cases(n, TOPOLOGIES[n])[:: 3 if n > 3 else 1]


def assert_replayed(n: int, case: Case, workers: list[list[np.ndarray]], where: str) -> float:
    """Check parameters, anchors and momenta, where they are kept; return the largest error."""
    expected = in_numpy(n, case)
    worst = 0.0
    for got, what in zip(zip(*workers, strict=True), "XAV", strict=False):
        message = f"{where}: {case.topology.name} {case.options}: {what}"
        np.testing.assert_allclose(np.array(got), expected[what], rtol=1e-11, atol=1e-13, err_msg=message)
        worst = max(worst, float(abs(np.array(got) - expected[what]).max()))
    return worst


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_the_simulator_computes_the_rule(n: int) -> None:
    for case in chosen(n):
        assert_replayed(n, case, in_simulation(n, case), "simulator")


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_the_rule(n: int) -> None:
    results = run_processes(on_rank, n, chosen(n))
    for index, case in enumerate(chosen(n)):
        assert_replayed(n, case, [result[index] for result in results], "processes")
