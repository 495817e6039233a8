"""How many seeds a table needs: against simulated tests, and on kept runs."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from common.experiments.collect import collect
from common.experiments.definitions import ROOT
from common.report.power import MOST_SEEDS, POWER, power_frame, power_of_difference, power_of_equality, seeds_for
from common.report.statistics import p_within
from scripts.sweep import main
from tests.experiments.conftest import make_table
from tests.experiments.synthetic import write_run


@pytest.mark.parametrize(("seeds", "margin", "level"), [(8, 1.2, 0.05), (20, 0.8, 0.05 / 3)])
def test_the_power_of_equality_is_what_simulated_tables_find(seeds: int, margin: float, level: float) -> None:
    samples = np.random.default_rng(0).normal(0, 1, (20_000, seeds))
    below, above = (
        ttest_1samp(samples, mean, axis=1, alternative=side).pvalue
        for mean, side in ((-margin, "greater"), (margin, "less"))
    )
    assert np.maximum(below, above)[0] == pytest.approx(p_within(samples[0], margin))
    found = np.mean(np.maximum(below, above) < level)
    assert power_of_equality(seeds, 1, margin, level) == pytest.approx(found, abs=0.01)


def test_the_power_of_a_difference_is_what_simulated_tests_find() -> None:
    samples = np.random.default_rng(0).normal(-0.7, 1, (20_000, 16))
    found = np.mean((ttest_1samp(samples, 0, axis=1).pvalue < 0.05) & (samples.mean(axis=1) < 0))
    assert power_of_difference(16, 1, -0.7, 0.05) == pytest.approx(found, abs=0.01)


def test_the_fewest_seeds_with_enough_power() -> None:
    seeds = seeds_for(power_of_equality, 0.6, 0.35, 0.05)
    assert power_of_equality(seeds - 1, 0.6, 0.35, 0.05) < POWER <= power_of_equality(seeds, 0.6, 0.35, 0.05)
    assert seeds_for(power_of_equality, 1, 100, 0.05) == 3
    assert seeds_for(power_of_equality, 1, 0.001, 0.05) is None
    assert 0.99 < power_of_equality(MOST_SEEDS, 1, 100, 0.05) <= 1


@pytest.mark.parametrize("power", [power_of_equality, power_of_difference])
def test_a_scatter_close_to_zero_needs_few_seeds(power) -> None:
    assert seeds_for(power, 1e-13, 1, 0.05) == 3


def test_differences_that_are_equal_up_to_rounding_need_no_number() -> None:
    table = make_table(columns=["top1_equivalent"], equivalent={"accumadam_aer": "allreduce"}, margins={"top1": 1})
    for cell in table.cells(Path("runs")):
        write_run(cell.run_dir, cell.overrides, accuracy=[90 + cell.seed / 10 + 0.1 * (cell.row.name == "allreduce")])
    (line,) = power_frame(collect(table, Path("runs"))).to_dict("records")
    assert (line["seeds"], line["for_equality"]) == ("3", "")


def test_kept_runs_say_how_many_seeds_a_table_needs(capsys) -> None:
    assert main(["table=table3_fair", f"runs={ROOT}/results/runs", "power=true"]) == 0
    out = capsys.readouterr().out.splitlines()
    (line,) = [line.split() for line in out if line.startswith("accumadam_complete") and "(too wide)" in line]
    assert line[:7] == ["accumadam_complete", "allreduce", "top1", "5", "0.59", "0.92", "+0.33"]
    assert line[7:] == ["1", "(too", "wide)", "7", "[13]", "28", "[64]"]


def test_without_runs_it_says_what_to_run_first(capsys) -> None:
    assert main(["table=table3", "power=true"]) == 2
    assert "make them with: python -m scripts.reproduce table=table3" in capsys.readouterr().err
