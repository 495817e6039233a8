"""Comparison of real processes with the simulator."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.distributed.processes import TIMEOUT_S, run_processes
from tests.distributed.scenarios import Scenario, in_process, in_simulation
from tests.naming import case

RTOL, ATOL = 2e-5, 2e-6  # float32 sums taken in another order, over some 20 steps


def assert_same(
    got: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str = "", rtol: float = 0, atol: float = 0
) -> None:
    """Check that two snapshots are equal, bit for bit unless tolerances are given."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol, atol, err_msg=f"{what} {name}")


def assert_equal_to_simulator(
    n: int,
    scenarios: Sequence[Scenario],
    rtol: float = RTOL,
    atol: float = ATOL,
    backend: str | None = "gloo",
    run: Callable[..., list[dict]] = in_process,
    timeout: float = TIMEOUT_S,
) -> list[list[dict]]:
    """Check every rank's parameters, buffers, mean model, consensus distance and byte counts against the simulator's.

    run: what every process calls

    Return the results of the processes, by rank and scenario.
    """
    real = run_processes(run, n, scenarios, backend=backend, timeout=timeout)
    for index, scenario in enumerate(scenarios):
        for rank, expected in enumerate(in_simulation(n, scenario)):
            got = real[rank][index]
            with case("rank", rank, scenario):
                for kind in ("state", "mean"):
                    assert_same(got[kind], expected[kind], kind, rtol, atol)
                assert got["distance"] == pytest.approx(expected["distance"], rel=1e-3, abs=5 * atol)
                assert got["counters"].rounds == expected["counters"].rounds
                assert scenario.local or got["counters"].rounds == scenario.steps
                assert got["scales"] == expected["scales"]
                if not scenario.options:  # a forced transport has other costs
                    assert got["counters"].bytes_sent == pytest.approx(expected["counters"].bytes_sent)
    return real
