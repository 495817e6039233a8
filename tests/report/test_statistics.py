"""What columns hold and show: statistics, differences, intervals and tests, against formulas and simulation."""

import math
from itertools import permutations
from math import nan
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from common.experiments.collect import collect
from common.experiments.quantities import Column, parse_column
from common.experiments.tables import Table
from common.report.statistics import (
    Comparison,
    ComparisonError,
    columns_of,
    corrected,
    definition,
    difference,
    exact,
    holm,
    mean_and_interval,
    p_beyond,
    p_within,
    paired_differences,
    show,
)
from common.report.tables import build_table, shown, write_table
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")


# Statistics over seeds.


def test_definitions():
    options = {"baseline": "allreduce", "equivalent": {"accumadam_aer": "allreduce"}, "margins": {"top1": 0.5}}
    names = ["top1", "de_top1_mean", "de_top1_difference", "top1_equivalent", "top1_published", "overlap", "workers"]
    rows = [row | {"labels": {"overlap": "?"}} for row in CONTENT["rows"]]
    table = make_table(
        columns=names, variants={"de": []}, labels={"overlap": "why"}, proxy_of="table3", rows=rows, **options
    )
    mean, de, difference, equivalent, published, label, workers = (definition(table, c) for c in table.columns)
    text = "final top-1 validation accuracy of the averaged model in percent; mean over seeds"
    assert (mean, de) == (f"mean over variants: {text}", f"de: {text}")
    assert difference.startswith("de: top1: this row minus the baseline, allreduce;")
    assert equivalent.startswith("whether the row equals another one within ± 0.5: yes, no, or open")
    assert published.startswith("top1: the published value, not measured here, for table3")
    assert (label, workers) == ("why", "number of workers")


def test_what_readers_and_machines_see():
    assert [show(Column("workers"), value) for value in (None, 4, "3/2")] == ["", "4", "3/2"]
    mean, median, reached, noise, published, difference = (
        parse_column(name, [], [], None, None)
        for name in (
            "top1", "top1_median", "steps_to_target_reached", "local_over_noise", "top1_published",
            "top1_published_difference",
        )
    )  # fmt: skip
    empty = [show(column, None) for column in (mean, median, reached, noise, published, difference)]
    assert empty == ["missing", "missing", "", "not recorded", "unknown", ""]
    assert [show(column, 0.0123) for column in (mean, reached, published, difference)] == ["0.01", "0", "0.01", "+0.01"]
    assert show(difference, -0.001) == "+0.00"
    assert exact(mean, 0.0123) == {"top1": 0.0123}


@pytest.mark.parametrize(
    ("quantity", "lowest", "median", "highest"), [("consensus_distance", 1.0, 2.0, nan), ("accuracy", nan, 1.0, 2.0)]
)
def test_a_run_without_a_finite_number_is_the_worst_in_any_order(quantity, lowest, median, highest):
    names = [f"{quantity}_{name}" for name in ("lowest", "median", "highest", "reached", "mean", "2sigma")]
    table = make_table(columns=names, metric=quantity)
    for values in permutations([nan, 2.0, 1.0]):
        for cell in table.cells(RUNS):
            value = values[cell.seed - 1]
            write_run(cell.run_dir, cell.overrides, accuracy=[value], consensus_distance=value)
        found = [values[0] for values in columns_of(collect(table, RUNS)).values()]
        assert found == pytest.approx([lowest, median, highest, 2, nan, nan], nan_ok=True)


def test_statistics_of_an_even_number_of_seeds_and_of_one():
    names = ["accuracy_median", "accuracy_mean", "accuracy_2sigma"]
    table = make_table(columns=names, seeds=[1, 2, 3, 4])
    for cell in list(table.cells(RUNS))[:5]:
        write_run(cell.run_dir, cell.overrides, accuracy=[[90.0, 70.0, 10.0, 80.0][cell.seed - 1]])
    found = columns_of(collect(table, RUNS))
    assert found["accuracy_median"] == [75.0, 90.0]
    assert found["accuracy_mean"] == [62.5, 90.0]
    assert found["accuracy_2sigma"] == [pytest.approx(2 * (3875 / 3) ** 0.5), None]


def test_published_numbers_differences_and_margin_stand_beside_ours():
    names = [f"top1_{name}" for name in ("published", "published_difference", "published_equivalent", "margin")]
    third = CONTENT["rows"][1] | {"name": "accumadam_complete", "topology": "complete"}
    options = {"baseline": "allreduce", "equivalent": {"accumadam_aer": "accumadam_complete"}, "margins": {"top1": 0.5}}
    rows = {"rows": [*CONTENT["rows"], third], "columns": [*names, "top1_equivalent"]}
    table = make_table(published=["table3"], **rows, **options)
    found = columns_of(collect(table, RUNS, allow_empty=True))
    shown = [[show(column, value) for value in found[column.name]] for column in table.columns[:4]]
    assert shown == [["76.01", "76.54", "76.34"], ["", "+0.53", "+0.33"], ["", "+0.20", ""], ["", "0.5", ""]]


# Columns that compare rows: the cells that readers see and the numbers that CSV files hold.

COLUMNS = ["method", "top1_difference", "top1_equivalent"]
DIFFERENCE = parse_column("top1_difference", [], [], "r", None)


def compared(accuracy: dict[str, list[float | None]], **changes) -> Table:
    """Return the small table with columns that compare its rows, and write its runs; None is a run that is missing."""
    options = {"baseline": "allreduce", "equivalent": {"accumadam_aer": "allreduce"}, "margins": {"top1": 3}}
    table = make_table(**{"columns": COLUMNS} | options | changes)
    for cell in table.cells(RUNS):
        value = accuracy[cell.row.name][cell.seed - 1]
        if value is not None:
            write_run(cell.run_dir, cell.overrides, accuracy=[value])
    return table


def test_cells_and_csv():
    table = compared({"allreduce": [89.0, 90.0, 93.0], "accumadam_aer": [90.0, 92.0, 97.0]})
    collection = collect(table, RUNS)
    texts = shown(build_table(collection), table)
    assert texts["top1_difference"].tolist() == ["baseline", "+2.33 [-1.46, +6.13]"]
    assert texts["top1 equal?"].tolist() == ["", "open"]
    write_table(collection, Path("out"), "make")
    lines = Path("out/small.csv").read_text().splitlines()
    assert lines[0] == (
        "method,top1_difference,top1_difference_low,top1_difference_high,top1_equivalent,top1_equivalent_to,"
        "top1_equivalent_p_within,top1_equivalent_p_beyond,top1_equivalent_difference,"
        "top1_equivalent_difference_low,top1_equivalent_difference_high"
    )
    assert lines[1] == "AllReduce" + "," * 10
    difference, p = "2.333333333,-1.4612497,6.127916367", p_within([1, 2, 4], 3)
    assert lines[2] == f"AccumAdam,{difference},undecided,allreduce,{p:.10g},1,{difference}"


def test_an_empty_cell_says_why():
    table = compared({"allreduce": [90.0, 91.0, 92.0], "accumadam_aer": [90.0, 92.0, None]})
    frame = build_table(collect(table, RUNS))
    assert list(shown(frame, table).iloc[1, 1:]) == ["other seeds"] * 2
    cells = [exact(column, value) for column, value in zip(table.columns, frame.iloc[1], strict=True)]
    assert {name: value for of in cells[1:] for name, value in of.items() if value is not None} == {
        "top1_equivalent_to": "allreduce"
    }


def test_comparisons_are_among_equal_numbers_of_workers_and_of_one_variant():
    variants, margins = {"de": ["data=digits"], "fr": ["data=other"]}, {"top1": 3, "train_loss": 0.5}
    columns = ["method", "workers", "de_top1_difference", "fr_top1_equivalent", "fr_train_loss_equivalent"]
    options = {"baseline": "allreduce", "equivalent": {"accumadam_aer": "allreduce"}, "columns": columns}
    table = make_table(variants=variants, workers=[4, 8], margins=margins, **options)
    for cell in table.cells(RUNS):
        base = {"allreduce_4": 50, "allreduce_8": 60, "accumadam_aer_4": 52, "accumadam_aer_8": 65}[cell.row.name]
        noise = cell.seed * (0.1 if cell.row.name.startswith("acc") else 0.2)
        value = base + noise + (1 if cell.variant == "fr" and cell.row.name.startswith("acc") else 0)
        write_run(cell.run_dir, cell.overrides, accuracy=[value], workers=cell.row.workers)
    frame = build_table(collect(table, RUNS))
    means = [cell.mean and round(cell.mean, 6) for cell in frame["de_top1_difference"]]
    assert means == [None, None, 1.8, 4.8]
    tests = frame["fr_top1_equivalent"].tolist()
    assert [cell.other for cell in tests] == [None, None, "allreduce_4", "allreduce_8"]
    assert [cell.mean for cell in tests[2:]] == pytest.approx([2.8, 5.8])
    # Four comparisons: two sizes and two quantities, whose losses are the same in every seed.
    assert [cell.verdict for cell in tests[2:]] == ["undecided", "no"]
    assert tests[2].within == pytest.approx(4 * p_within([2.9, 2.8, 2.7], 3))
    assert tests[3].beyond == pytest.approx(4 * p_beyond([5.9, 5.8, 5.7], 3))


def test_a_column_of_all_variants_has_one_number_for_each_seed():
    """Its mean over the variants; seed 3 of the second row lacks a variant."""
    variants = {"de": ["data=digits"], "fr": ["data=other"]}
    columns = ["top1", "top1_2sigma", "top1_difference"]
    table = make_table(variants=variants, columns=columns, baseline="allreduce", seeds=[1, 2, 3, 4])
    for cell in table.cells(RUNS):
        value = {"de": 50, "fr": 80}[cell.variant] + cell.seed * (3 if cell.row.name == "allreduce" else 2)
        if (cell.row.name, cell.variant, cell.seed) != ("accumadam_aer", "fr", 3):
            write_run(cell.run_dir, cell.overrides, accuracy=[value])
    collection = collect(table, RUNS)
    assert [*collection.values(table.columns[0]).values()] == [{1: 68, 2: 71, 3: 74, 4: 77}, {1: 67, 2: 69, 4: 73}]
    found = columns_of(collection)
    assert found["top1_2sigma"] == pytest.approx([2 * 15**0.5, 2 * (28 / 3) ** 0.5])
    assert found["top1_difference"][1].reason == "other seeds"
    write_run(cell.run_dir.with_name("seed_3"), [*cell.settings[:-1], "seed=3"], accuracy=[86])
    same = columns_of(collect(table, RUNS))["top1_difference"][1]
    assert (same.mean, same.low, same.high) == pytest.approx(mean_and_interval([-1, -2, -3, -4]))


def test_a_row_without_a_baseline_of_its_workers_says_so():
    rows = [CONTENT["rows"][0], CONTENT["rows"][1] | {"name": "accumadam_aer_8"}]
    rows = [row | {"overrides": [*row["overrides"], f"workers.count={n}"]} for row, n in zip(rows, (4, 8), strict=True)]
    rows[0] = rows[0] | {"name": "allreduce_4"}
    table = make_table(rows=rows, baseline="allreduce", columns=["top1_difference"])
    found = columns_of(collect(table, RUNS, allow_empty=True))["top1_difference"]
    assert [cell.reason for cell in found] == ["baseline", "no baseline"]


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_speedups_are_of_positive_numbers(value):
    assert difference(ROW | {1: value}, OTHER, ratios=True).reason == "not positive"


def test_no_minus_sign_before_zero_and_no_interval_without_spread():
    assert show(DIFFERENCE, Comparison(-0.001, -0.1, 0.098)) == "+0.00 [-0.10, +0.10]"
    alike = difference({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.0, 2: 2.0, 3: 3.0})
    assert show(DIFFERENCE, alike) == "+0.00 in every seed"


def test_missing_comparisons_count():
    one = Comparison(0.0, -0.1, 0.1, "", "ring", 0.02, 1.0)
    assert corrected([one])[0].verdict == "yes"
    assert [cell.within for cell in corrected([one, Comparison(reason="missing", other="ring")])] == [0.04, 1.0]
    assert corrected([one, *[Comparison(reason="missing", other="ring")] * 2])[0].verdict == "undecided"


# The arithmetic of comparisons.

ROW = {1: 90.0, 2: 92.0, 3: 97.0}
OTHER = {3: 93.0, 1: 89.0, 2: 90.0}  # differences 1, 2 and 4


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
    assert paired_differences(ROW, OTHER) == [1, 2, 4]
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
