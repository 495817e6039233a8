"""Columns that compare rows: from the runs to the cells that readers see and the numbers that CSV files hold."""

from pathlib import Path

import pytest

from common.experiments.collect import collect
from common.experiments.quantities import QUANTITIES
from common.experiments.tables import Table
from common.report.comparisons import Compared, Equivalence, corrected, p_beyond, p_within
from common.report.statistics import exact
from common.report.tables import build_table, legend, readable, shown, write_table
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")
COLUMNS = ["method", "top1_difference", "top1_equivalent"]
TOP1 = QUANTITIES["top1"].style


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
    texts = readable(build_table(collection), table)
    assert texts["top1_difference"].tolist() == ["baseline", "+2.33 [-1.46, +6.13]"]
    assert texts["top1_equivalent"].tolist() == ["", "undecided (p = 0.26), to allreduce: +2.33 [-1.46, +6.13]"]
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


def test_pages_show_a_verdict_and_the_legend_says_once_what_was_compared():
    table = compared({"allreduce": [89.0, 90.0, 93.0], "accumadam_aer": [90.0, 92.0, 97.0]})
    frame = build_table(collect(table, RUNS))
    assert shown(frame, table)["top1 equal?"].tolist() == ["", "open"]
    line = legend(table, frame)[-1]
    assert line.startswith("`top1 equal?`: whether the row equals another one within ± 3: yes, no, or open where ")
    assert line.endswith("over all tests of the table. accumadam_aer to allreduce")


@pytest.mark.parametrize(
    ("allreduce", "accumadam", "reason"),
    [
        ([90.0, 91.0, None], [90.0, 92.0, None], "fewer than 3 seeds"),
        ([90.0, 91.0, 92.0], [90.0, 92.0, None], "other seeds"),
        ([90.0, 91.0, 92.0], [None, None, None], "missing"),
        ([None, None, None], [90.0, 91.0, 92.0], "missing"),
        ([90.0, 91.0, float("nan")], [90.0, 91.0, 92.0], "diverged"),
    ],
)
def test_an_empty_cell_says_why(allreduce, accumadam, reason):
    table = compared({"allreduce": allreduce, "accumadam_aer": accumadam})
    frame = build_table(collect(table, RUNS))
    assert list(readable(frame, table).iloc[1, 1:]) == [reason, reason]
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


def test_verdicts():
    texts = [Equivalence(0.1, -0.2, 0.4, "", "ring", *p).show(TOP1) for p in ((0.049, 1), (0.05, 0.05), (1, 0.001))]
    assert texts == [
        "yes (p = 0.049), to ring: +0.10 [-0.20, +0.40]",
        "undecided (p = 0.05), to ring: +0.10 [-0.20, +0.40]",
        "no (p = 0.001), to ring: +0.10 [-0.20, +0.40]",
    ]


def test_no_minus_sign_before_zero_and_no_interval_without_spread():
    assert Compared(-0.001, -0.1, 0.098).show(TOP1) == "+0.00 [-0.10, +0.10]"
    assert Compared.of({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.0, 2: 2.0, 3: 3.0}).show(TOP1) == "+0.00 in every seed"


def test_missing_comparisons_count():
    one = Equivalence(0.0, -0.1, 0.1, "", "ring", 0.02, 1.0)
    assert corrected([one])[0].verdict == "yes"
    assert [cell.within for cell in corrected([one, Equivalence(reason="missing", other="ring")])] == [0.04, 1.0]
    assert corrected([one, *[Equivalence(reason="missing", other="ring")] * 2])[0].verdict == "undecided"


def test_a_table_may_compare_without_a_baseline():
    content = CONTENT | {"equivalent": {"accumadam_aer": "allreduce"}, "margins": {"top1": 1}}
    table = make_table(**content | {"columns": ["method", "top1_equivalent"]})
    assert [table.equivalent_of(row) for row in table.rows] == [None, "allreduce"]
    assert [table.baseline_of(row) for row in table.rows] == [None, None]
