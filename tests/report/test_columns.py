"""Columns are parsed from their names, once."""

import math
from itertools import permutations
from types import SimpleNamespace

import pytest

from common.report.columns import Column, Label, RowData, parse_column
from common.report.published import Published


@pytest.mark.parametrize(
    ("name", "variant", "quantity", "statistic"),
    [
        ("spectral_gap", None, "spectral_gap", "mean"),
        ("train_loss_mean", None, "train_loss", "mean"),
        ("en_de_bleu_2sigma", "en_de", "bleu", "2sigma"),
        ("en_de_bleu_published", "en_de", "bleu", "published"),
        ("en_de_bleu_published_2sigma", "en_de", "bleu", "published_2sigma"),
        ("top1_difference", None, "top1", "difference"),
        ("en_fr_bleu_equivalent", "en_fr", "bleu", "equivalent"),
        ("spectral_gap_by_formula", None, "spectral_gap", "by_formula"),
    ],
)
def test_variant_quantity_and_statistic(name, variant, quantity, statistic):
    column = parse_column(name, {}, ["en_de", "en_fr"], baseline="allreduce", margins={"bleu": 0.5})
    assert isinstance(column, Column)
    assert (column.variant, column.quantity.name, column.statistic.name) == (variant, quantity, statistic)
    assert column.published_name == (f"{variant}_{quantity}" if variant else quantity)


def test_definitions():
    end = "final top-1 validation accuracy of the averaged model in percent; mean over seeds"
    assert parse_column("top1", {}).definition == end
    assert parse_column("de_top1_mean", {}, ["de"]).definition == f"de: {end}"
    difference = parse_column("de_top1_difference", {}, ["de"], baseline="sgd").definition
    assert difference.startswith("de: top1: the row's minus that of the baseline, sgd;")
    equivalent = parse_column("top1_equivalent", {}, margins={"top1": 0.5})
    assert equivalent.margin == 0.5
    assert "equals the row named in the cell to within 0.5, and" in equivalent.definition
    published = parse_column("top1_published", {}, proxy_of="table3").definition
    assert published.startswith("top1: the published value, not measured here, of table3")


def test_labels_and_what_readers_see():
    assert parse_column("overlap", {"overlap": "why"}) == Label("overlap", "why")
    assert [parse_column("workers", {}).show(value) for value in (None, 4, "3/2")] == ["", "4", "3/2"]
    mean, published = (parse_column(f"top1_{kind}", {}) for kind in ("mean", "published"))
    assert [column.show(None) for column in (mean, published)] == ["missing", "unknown"]
    assert [column.show(0.0123) for column in (mean, published)] == ["0.01", "0.01"]
    assert mean.exact(0.0123) == {"top1_mean": 0.0123}


@pytest.mark.parametrize(
    ("quantity", "lowest", "median", "highest"),
    [("validation_loss", 1.0, 2.0, math.nan), ("accuracy", math.nan, 1.0, 2.0)],
)
def test_a_run_without_a_finite_number_is_the_worst_in_any_order(quantity, lowest, median, highest):
    for values in permutations([math.nan, 2.0, 1.0]):
        runs = [SimpleNamespace(last=lambda *_, value=value: value) for value in values]
        found = [parse_column(f"{quantity}_{name}", {}).of(RowData(runs)) for name in ("lowest", "median", "highest")]
        assert found == pytest.approx([lowest, median, highest], nan_ok=True)


def test_published_differences_and_margin_stand_beside_ours():
    row, baseline, equal = ({"top1": Published(value=value)} for value in (76.54, 76.01, 76.34))
    data = RowData([], equal_to="complete", published=row, baseline_published=baseline, equal_published=equal)
    names = ("published_difference", "published_equivalent", "margin")
    columns = [parse_column(f"top1_{name}", {}, margins={"top1": 0.5}) for name in names]
    assert [column.show(column.of(data)) for column in columns] == ["+0.53", "+0.20", "0.5"]
    unknown = RowData([], published={"top1": Published(value=None, reason="not published")}, baseline_published=row)
    assert [column.of(unknown) for column in columns] == [None, None, None]
