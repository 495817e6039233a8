"""Differences, intervals and equivalence tests against formulas, published examples and simulation."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from common.report.comparisons import ComparisonError, holm, mean_and_interval, p_beyond, p_within, paired_differences

ROW = {1: 90.0, 2: 92.0, 3: 97.0}
OTHER = {3: 93.0, 1: 89.0, 2: 90.0}  # differences 1, 2 and 4


def test_differences_are_paired_by_seed():
    assert paired_differences(ROW, OTHER) == [1, 2, 4]


@pytest.mark.parametrize(
    ("values", "others", "reason"),
    [
        ({}, OTHER, "missing"),
        (ROW, {}, "missing"),
        (ROW, OTHER | {1: None}, "missing"),
        ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 3.0}, "fewer than 3 seeds"),
        (ROW, {1: 1.0, 2: 2.0, 4: 3.0}, "other seeds"),
        (ROW, {1: 1.0, 2: 2.0}, "other seeds"),
        (ROW, OTHER | {2: math.nan}, "diverged"),
        (ROW, OTHER | {2: math.inf}, "diverged"),
    ],
)
def test_what_cannot_be_compared_says_why(values, others, reason):
    with pytest.raises(ComparisonError, match=f"^{reason}$"):
        paired_differences(values, others)


def test_interval_by_hand_and_by_scipy():
    """Mean 7/3, standard error sqrt(7/9); 4.30265 is the 97.5 % point of t with 2 degrees of freedom."""
    found = mean_and_interval([1, 2, 4])
    half = 4.302652729911275 * (7 / 9) ** 0.5
    assert found == pytest.approx((7 / 3, 7 / 3 - half, 7 / 3 + half))
    by_scipy = ttest_rel([90, 92, 97], [89, 90, 93]).confidence_interval(0.95)
    assert found[1:] == pytest.approx((by_scipy.low, by_scipy.high))


@pytest.mark.parametrize("differences", [[0.0, 0.0, 0.0], [0.1, 0.1, 0.3 - 0.2]])
def test_the_same_difference_in_every_seed_proves_nothing(differences):
    assert mean_and_interval(differences) == (pytest.approx(differences[0]), None, None)
    assert p_within(differences, 1) == p_beyond(differences, 0.01) == 1


@pytest.mark.parametrize(
    ("mean", "error", "p"),
    [(0.1646666666666667, 0.1357514067862445, 0.003166881489265175), (0.562666666666667, 0.2478276, 0.4412034)],
)
def test_equivalence_against_examples_of_r(mean, error, p):
    """15 pairs of R's package equivalence with a margin of 0.6; these have the same mean and standard error."""
    shape = np.arange(15) - 7.0
    differences = mean + error * 15**0.5 * shape / shape.std(ddof=1)
    assert p_within(differences, 0.6) == pytest.approx(p, rel=1e-6)
    assert p_within(-differences, 0.6) == pytest.approx(p, rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_both_p_values_by_their_formulas(sign):
    differences = [sign * d for d in (1, 2, 4)]
    mean, error = 7 / 3, (7 / 9) ** 0.5
    assert p_within(differences, 3) == pytest.approx(t.cdf((mean - 3) / error, 2))
    assert p_beyond(differences, 0.5) == pytest.approx(2 * t.sf((mean - 0.5) / error, 2))
    assert p_beyond(differences, 3) == 1


def test_holm_by_hand():
    """Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1; none below the one before it."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.001, 1.0, 0.6]) == pytest.approx([0.003, 1.0, 1.0])
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_coverage_and_false_equivalence():
    """Seeds of the same number share an effect five times the noise; the true difference is the margin."""
    random, margin, runs = np.random.default_rng(0), 0.5, 300
    covered = equal = apart = 0
    for _ in range(runs):
        shared = random.normal(0, 5, 3)
        a, b = shared + random.normal(margin, 0.1, 3), shared + random.normal(0, 0.1, 3)
        differences = paired_differences(dict(enumerate(a)), dict(enumerate(b)))
        _, low, high = mean_and_interval(differences)
        covered += low <= margin <= high
        equal += p_within(differences, margin) < 0.05
        apart += p_beyond(differences, margin) < 0.05
    assert 0.93 <= covered / runs <= 0.97
    assert 0.03 <= equal / runs <= 0.07
    assert 0.01 <= apart / runs <= 0.045  # half of 5 %: the other side is far away
