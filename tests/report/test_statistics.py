"""What columns hold and show."""

from itertools import permutations
from math import nan
from pathlib import Path

import pytest

from common.experiments.collect import collect
from common.experiments.columns import NUMBERS, Column, parse_column
from common.report.statistics import DEFINITIONS, columns_of, definition, exact, show
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")


def test_every_statistic_has_a_definition():
    assert {statistic for _, statistic in NUMBERS.values()} == DEFINITIONS.keys()


def test_definitions():
    options = {"baseline": "allreduce", "equivalent": {"accumadam_aer": "allreduce"}, "margins": {"top1": 0.5}}
    names = ["top1", "de_top1_mean", "de_top1_difference", "top1_equivalent", "top1_published", "overlap", "workers"]
    rows = [row | {"labels": {"overlap": "?"}} for row in CONTENT["rows"]]
    table = make_table(
        columns=names, variants={"de": []}, labels={"overlap": "why"}, proxy_of="table3", rows=rows, **options
    )
    mean, de, difference, equivalent, published, label, workers = (definition(table, c) for c in table.columns)
    assert mean == "final top-1 validation accuracy of the averaged model in percent; mean over seeds"
    assert de == f"de: {mean}"
    assert difference.startswith("de: top1: the row's minus that of the baseline, allreduce;")
    assert "equals the row named in the cell to within 0.5, and" in equivalent
    assert published.startswith("top1: the published value, not measured here, of table3")
    assert (label, workers) == ("why", "number of workers")


def test_what_readers_and_machines_see():
    assert [show(Column("workers"), value) for value in (None, 4, "3/2")] == ["", "4", "3/2"]
    mean, median, reached, noise, published, difference = (
        parse_column(name)
        for name in (
            "top1", "top1_median", "time_to_target_s_reached", "noise_scale", "top1_published",
            "top1_published_difference",
        )
    )  # fmt: skip
    empty = [show(column, None) for column in (mean, median, reached, noise, published, difference)]
    assert empty == ["missing", "missing", "", "not recorded", "unknown", ""]
    assert [show(column, 0.0123) for column in (mean, reached, published, difference)] == ["0.01", "0", "0.01", "+0.01"]
    assert show(difference, -0.001) == "+0.00"
    assert exact(mean, 0.0123) == {"top1": 0.0123}


@pytest.mark.parametrize(
    ("quantity", "lowest", "median", "highest"),
    [("consensus_distance", 1.0, 2.0, nan), ("accuracy", nan, 1.0, 2.0)],
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
    assert shown == [
        ["76.01", "76.54", "76.34"],
        ["", "+0.53", "+0.33"],
        ["", "+0.20", ""],
        ["", "0.5", ""],
    ]
