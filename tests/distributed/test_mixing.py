"""Mixing by narrow messages alone (lr = 0), from unequal parameters: the mean is conserved."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.topology import build
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, real, snapshot

STILL = Scenario(optimizer="still")
SIZES = {
    3: ("ring", "star", "base_k", "random_matching", "complete"),
    4: ("one_peer_exponential", "static_exponential", "hypercube", "aer", "torus", "complete"),
}


def mixed(rank: int, n: int, scenarios: list[Scenario]) -> list[list[np.ndarray]]:
    """For each scenario: this rank's parameters (one vector) at the start and after each step."""
    histories = []
    for scenario in scenarios:
        training = real(rank, scenario)
        training.model.load_state_dict(scenario.build(seed=100 + rank).state_dict())
        history = [flat(training.model)]
        for _ in range(scenario.steps):
            training.update()
            history.append(flat(training.model))
        training.model.close()
        histories.append(history)
    return histories


def flat(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([value.ravel() for value in snapshot(model).values()])


def histories(n: int, scenarios: list[Scenario]) -> list[np.ndarray]:
    """One array [step, rank, parameter] for each scenario."""
    results = run_processes(mixed, n, scenarios)
    return [np.array([result[index] for result in results]).swapaxes(0, 1) for index in range(len(scenarios))]


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_rounded_messages_conserve_the_mean(n: int) -> None:
    """In bfloat16 a value loses up to 2^-9 of itself; the mean must not."""
    rounded = [replace(STILL, topology=t, steps=12, options={"message_dtype": torch.bfloat16}) for t in SIZES[n]]
    for name, X in zip(SIZES[n], histories(n, rounded), strict=True):
        np.testing.assert_allclose(X[-1].mean(0), X[0].mean(0), atol=1e-6, err_msg=name)
        np.testing.assert_allclose(X[1], build(name, n).matrix(0) @ X[0], atol=2**-8, err_msg=name)


NARROW = {torch.bfloat16: 2**-8, torch.int8: 2**-6}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_messages_between_hosts_conserve_the_mean(dtype: torch.dtype) -> None:
    """Averages inside hosts are exact, what travels between them is rounded."""
    aer = replace(STILL, topology="aer", workers_per_host=2, steps=12, options={"message_dtype": dtype})
    (X,) = histories(4, [aer])
    for t in range(3):
        expected = build("aer", 4, 2).matrix(t) @ X[t]
        np.testing.assert_allclose(X[t + 1], expected, atol=NARROW[dtype], err_msg=str(t))
        np.testing.assert_allclose(X[t + 1].mean(0), X[0].mean(0), atol=1e-6)
    np.testing.assert_array_equal(X[-1][0], X[-1][1])  # ranks of a host agree bit for bit


def test_error_feedback_makes_up_for_what_8_bits_leave_out() -> None:
    """The mean is conserved, and workers come much nearer to each other than 8 bits tell values apart."""
    ring = replace(STILL, topology="ring", steps=60, options={"message_dtype": torch.int8})
    for n in (3, 4):
        (X,) = histories(n, [ring])
        np.testing.assert_allclose(X[-1].mean(0), X[0].mean(0), atol=1e-5)
        step = abs(X[0]).max() / 127
        assert abs(X[0] - X[0].mean(0)).max() > 20 * step
        late = X[-20:]  # messages vary by a step; their mean over time does not
        assert abs(late.mean(0) - late.mean((0, 1))).max() < step / 4
