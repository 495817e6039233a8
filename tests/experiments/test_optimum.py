"""The best rate by a parabola: a known one is found, and its interval covers it as often as it says."""

import math

import numpy as np
import pytest

from common.experiments.trials import fit_optimum

RATES = [0.0025, 0.005, 0.01, 0.02, 0.04]


def losses(best: float, noise: float, seeds: int, generator: np.random.Generator) -> np.ndarray:
    """Return 2 + log(rate / best)^2, with a level for each seed and noise for each trial: [rates, seeds]."""
    curve = 2 + np.log(np.array(RATES) / best) ** 2
    return curve[:, None] + generator.normal(0, 1, seeds) + generator.normal(0, noise, (len(RATES), seeds))


@pytest.mark.parametrize("highest", [False, True])
@pytest.mark.parametrize("count", [3, 5])
def test_a_known_optimum_is_found_exactly_whatever_the_levels_of_the_seeds(highest: bool, count: int) -> None:
    sign = -1 if highest else 1
    values = sign * losses(0.012, 0, 3, np.random.default_rng(0))
    found = fit_optimum(RATES[-count:], values[-count:], highest, RATES)
    assert (found.rate, found.low, found.high) == (0.012, pytest.approx(0.012), pytest.approx(0.012))
    assert found.value == pytest.approx(2 * sign + (values[2] - sign * (2 + math.log(0.01 / 0.012) ** 2)).mean())
    assert found.scatter == pytest.approx(0, abs=1e-9)
    assert np.polyval(found.parabola, math.log(0.024)) == pytest.approx(found.value + sign * math.log(2) ** 2)


def test_the_interval_covers_the_optimum_and_the_scatter_is_that_of_trials() -> None:
    """With all rates, and with the three around the lowest mean, which noise chooses."""
    generator = np.random.default_rng(1)
    covered, scatter, runs = {3: 0, 5: 0}, [], 400
    for _ in range(runs):
        best = 0.01 * 2 ** generator.uniform(-0.5, 0.5)
        values = losses(best, 0.3, 3, generator)
        first = min(max(int(values.mean(axis=1).argmin()) - 1, 0), 2)
        for count, part in ((3, slice(first, first + 3)), (5, slice(0, 5))):
            found = fit_optimum(RATES[part], values[part], False, RATES)
            covered[count] += found.low <= best <= found.high
        scatter.append(found.scatter)
    for count, of in covered.items():
        assert 0.92 <= of / runs <= 0.99, count
    assert np.sqrt(np.mean(np.square(scatter))) == pytest.approx(0.3, rel=0.05)


def test_means_that_are_no_parabola_widen_the_interval() -> None:
    x = np.log(np.array(RATES) / 0.01)
    skewed = (x**2 + 0.3 * x**3)[:, None] + np.random.default_rng(2).normal(0, 0.01, (5, 3))
    found = fit_optimum(RATES, skewed, False, RATES)
    assert found.low <= 0.01 <= found.high


def test_noise_that_hides_the_curvature_leaves_all_rates_that_were_tried() -> None:
    values = losses(0.01, 30, 3, np.random.default_rng(6))
    found = fit_optimum(RATES, values, False, [0.001, *RATES, 0.1])
    assert (found.low, found.high) == (0.001, 0.1)


@pytest.mark.parametrize("curve", [[1, 1, 1], [1, 2, 1], [3, 2, 1.5], [1, 3, 6]], ids=["flat", "bent", "high", "low"])
def test_without_an_optimum_between_the_rates_there_is_none(curve: list[float]) -> None:
    assert fit_optimum(RATES[:3], np.array(curve, float)[:, None] + np.arange(3), False, RATES) is None
