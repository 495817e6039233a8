"""The theorems' benchmark: exact moments against plain recursions, the gradient against autograd, and the program."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.benchmarks import theorems
from scripts.benchmarks.theorems import MOMENTUM, Errors, main, matrices_of, mean_errors, transient


@pytest.mark.parametrize(("name", "n"), [("ring", 5), ("one_peer_exponential", 6), ("aer", 4)])
def test_errors_are_those_of_the_recursion_of_means_and_covariances(name: str, n: int) -> None:
    draw = np.random.default_rng(0)
    h, pull, rate = np.exp(draw.normal(0, 0.5, (2, n))), draw.normal(size=(2, n)), 0.02
    matrices = matrices_of(name, n)
    errors = np.zeros((2, 8 * len(matrices)))
    for k in range(2):
        mean, covariance = np.repeat([1.0, 0], n), np.zeros((2 * n, 2 * n))
        for t in range(errors.shape[1]):
            errors[k, t] = mean[:n].mean() ** 2 + covariance[:n, :n].mean()
            w = matrices[t % len(matrices)]
            momentum = np.block([[np.eye(n), np.zeros((n, n))], [w @ np.diag(h[k]), MOMENTUM * w]])
            mean = momentum @ mean + np.concatenate([np.zeros(n), w @ pull[k]])
            covariance = momentum @ covariance @ momentum.T
            covariance[n:, n:] += w @ w.T
            descent = np.block([[w, -rate * w], [np.zeros((n, n)), np.eye(n)]])
            mean, covariance = descent @ mean, descent @ covariance @ descent.T
    expected = [errors[:, : len(matrices) * periods].mean() for periods in (1, 2, 4, 8)]
    got = mean_errors(matrices, h, pull, rate, doublings=4)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_steps_to_an_error_and_transients() -> None:
    steps = 2.0 ** np.arange(10)
    parallel = Errors(steps, 1 / np.sqrt(steps))
    assert parallel.reach(0.1) == pytest.approx(100)
    assert np.isnan(parallel.reach(0.01))
    late = Errors(steps, (1 + 10 / steps) / np.sqrt(steps))  # 1.25 times at 40 steps
    assert transient(late, parallel) == (64, pytest.approx(11))
    assert np.isnan(transient(Errors(steps, 2 / np.sqrt(steps)), parallel)[0])


def test_the_gradient_is_that_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, generator=draw, dtype=torch.float64, requires_grad=True)
    features = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    labels = torch.tensor([1.0, -1, 1, 1, -1], dtype=torch.float64)
    torch.nn.functional.softplus(-labels * (features @ x)).mean().backward()
    torch.testing.assert_close(theorems.gradient(x.detach(), features, labels), x.grad)


def test_the_program_writes_both_tables(tmp_path: Path) -> None:
    small = ["workers=1,16", "problems=1", "seeds=1", "steps=256", "epsilon_quadratic=0.1", "epsilon_logistic=0.01"]
    assert main([*small, f"output={tmp_path}"]) == 0
    table = pd.read_csv(tmp_path / "theorems_quadratic.csv").set_index("topology")
    assert table.loc["one_peer_exponential", "exact_after"] == 4
    assert table.loc["complete", "relative_speedup"] == 1
    assert set(pd.read_csv(tmp_path / "theorems_logistic.csv").method) == {"Adam", "DAdam", "AccumAdam"}
    assert "Predicted" in (tmp_path / "theorems_logistic.md").read_text()


def test_conclusions_are_drawn_from_the_topologies_that_exist() -> None:
    row = {"method": "DAdam", "workers": 2, "steps": 8, "slope": -0.5}
    table = pd.DataFrame([row | {"topology": name} for name in theorems.topologies(2)])
    assert "Measured: 1 to 1 times them." in theorems.conclude_logistic(table)[0]
