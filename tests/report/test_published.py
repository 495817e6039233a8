"""The published numbers: every file is valid, values are those of the papers, what is unknown says why."""

from pathlib import Path

import pytest

from common.cli import UsageError
from common.experiments.definitions import names_in
from common.report.published import PAPER, Published, load_published, published_lines, published_values
from common.topology import build

GOOD = """
paper: promise
title: T
source: S
hardware: H
runs: R
quantities: {bleu: {unit: BLEU, definition: D}}
rows: [{name: a, labels: {method: A}, values: {bleu: 27.79 +- 0.16}}]
"""


def test_every_file_is_valid_and_names_its_source() -> None:
    for name in names_in(PAPER):
        table = load_published(name)
        assert table.source, name
        assert table.hardware, name
        assert "arXiv" in published_lines([name])[0], name
        assert len(table.frame()) == len(table.rows), name


def test_numbers() -> None:
    for name, row, quantity, value, two_sigma in [
        ("table2", "allreduce", "en_de_bleu", 27.79, 0.16),
        ("table2", "accumadam_complete", "en_fr_meteor", 0.6704, 0.0017),
        ("table3", "accumadam_aer", "top1", 76.54, None),
        ("figure6", "a40_32_decent_aer", "step_ms", 67.9, None),
        ("exponential", "one_peer_exponential_8", "top1", 76.52, None),
        ("allreduce_baselines", "sgd", "top1", 77.386, 0.1773),
        ("allreduce_baselines", "sam_v1", "top1", 77.6467, 0.2698),
        ("gpt2_log", "step_210000", "validation_loss", 2.971496, None),
    ]:
        assert published_values((name,))[row][quantity] == Published(value=value, two_sigma=two_sigma), (name, row)


def test_what_is_not_known_has_a_reason() -> None:
    for name, quantity in [("table1", "seconds"), ("gpt2", "loss"), ("exponential_methods", "mobilenet_v2_top1")]:
        unknown = [row.values[quantity] for row in load_published(name).rows if row.values[quantity].value is None]
        assert unknown, name
        assert all(cell.reason for cell in unknown), name


def test_gaps_by_the_papers_formulas_are_those_of_our_topologies() -> None:
    for row in load_published("exponential_spectral_gap").rows:
        topology = build(row.labels["topology"], row.labels["workers"])
        assert row.values["spectral_gap"].value == pytest.approx(topology.spectral_gap(), abs=1e-6)


def test_curves_end_at_the_values_of_table_2() -> None:
    figure = load_published("figure7")
    last = figure.read_curves().groupby(["method", "topology"]).last()
    assert last["epoch"].eq(24).all()
    table = published_values(("table2",))
    for row in figure.rows:
        key = (row.labels["method"].lower(), row.labels["topology"])
        assert last.loc[key, "bleu"] == pytest.approx(table[row.name]["en_de_bleu"].value, abs=0.03)  # digitised
        assert last.loc[key, "meteor"] == pytest.approx(table[row.name]["en_de_meteor"].value, abs=0.0005)
        assert last.loc[key, "time_ks"] == row.values["time_ks"].value
        assert row.values["step_ms"].value == pytest.approx(row.values["time_ks"].value * 1e6 / 137_000, abs=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("27.79 +- 0.16", "null"), "expected a number, or null and the reason"),
        (("27.79 +- 0.16", "{value: 1, reason: why}"), "expected a number, or null and the reason"),
        (("27.79 +- 0.16", "many"), "expected a valid number"),
        (("{bleu: 27", "{blue: 27"), "row 'a': expected values of bleu"),
        (("source", "sauce"), "sauce: unknown key; did you mean 'source'?"),
        (("paper: promise", "paper: other"), "expected 'promise', 'exponential' or 'related'"),
        (("hardware: H", "curves: none.csv\nhardware: H"), "no such file in results/paper"),
        (("definition: D", "defn: D"), "quantities.bleu.defn: unknown key"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "t.yaml").write_text(GOOD)
    assert load_published("t", tmp_path).rows[0].values["bleu"].two_sigma == 0.16
    (tmp_path / "t.yaml").write_text(GOOD.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_published("t", tmp_path)
    assert str(caught.value).startswith("t.yaml: ")
    assert message in str(caught.value)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'table2'"):
        load_published("tabel2", PAPER)
