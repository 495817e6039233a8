"""What results/README.md repeats of the tables is what they hold."""

import re

import pandas as pd
import pytest

from common.report.definitions import ROOT
from common.report.published import load_published
from common.report.registry import table_names

README = (ROOT / "results" / "README.md").read_text()


def discussion(name: str) -> str:
    return README.split(f"<!-- discussion: {name} -->")[1].split("<!-- end -->")[0]


def cells(name: str) -> list[list[str]]:
    """The rows of the discussion's table."""
    rows = [line for line in discussion(name).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def with_spread(row: pd.Series) -> str:
    return f"{row['top1_mean']:.2f} ± {row['top1_2sigma']:.2f}"


def test_every_proxy_has_a_place() -> None:
    for name in table_names():
        if name.endswith("_proxy") or name in ("ablation", "topologies"):
            assert discussion(name)


def test_table3() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "table3_proxy.csv")
    published = load_published("table3").rows
    for (_, row), there, shown in zip(ours.iterrows(), published, cells("table3_proxy"), strict=True):
        values = there.values
        assert shown[2] == f"{values['top1'].value:.2f} / {values['train_loss'].value:.3f}"
        assert shown[3:5] == [with_spread(row), f"{row['train_loss_mean']:.3f}"]
        assert shown[0] == row["method"]
        assert (float(shown[5]) if shown[5] else None) == (
            pytest.approx(row["top1_p_value"], abs=0.005) if shown[5] else None
        )


def test_exponential_graphs() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "exponential_proxy.csv")
    published = {row.name: row.values["top1"].value for row in load_published("exponential").rows}
    topologies = list(dict.fromkeys(re.sub(r"_\d+$", "", name) for name in published))
    for topology, shown in zip(topologies, cells("exponential_proxy"), strict=True):
        there = [published[f"{topology}_{n}"] for n in (4, 8, 16, 32)]
        assert shown[1] == ("unknown" if None in there else " / ".join(f"{value:.2f}" for value in there))
        label = "complete" if topology == "parallel_sgd" else topology
        rows = ours[ours["topology"] == label].set_index("workers")
        assert shown[2] == " / ".join(f"{rows.loc[n, 'top1_mean']:.2f}" for n in (4, 8, 16))
        assert shown[3] == with_spread(rows.loc[32])


def test_table2() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "table2_proxy.csv")
    published = load_published("table2").rows
    for (_, row), there, shown in zip(ours.iterrows(), published, cells("table2_proxy"), strict=True):
        assert (shown[0], shown[1].lower()) == (row["method"], row["topology"])
        both = [there.values[f"{pair}_bleu"].value for pair in ("en_de", "en_fr")]
        assert shown[2] == " / ".join(f"{value:.2f}" for value in both)
        for pair, value, p in (("en_de", shown[3], shown[5]), ("en_fr", shown[4], shown[6])):
            assert value == f"{row[f'{pair}_bleu_mean']:.2f} ± {row[f'{pair}_bleu_2sigma']:.2f}"
            expected = row[f"{pair}_bleu_p_value"]
            assert p == ("" if pd.isna(expected) else f"{expected:.2g}")


def test_gpt2() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "gpt2_proxy.csv")
    for (_, row), shown in zip(ours.iterrows(), cells("gpt2_proxy"), strict=True):
        assert shown[:2] == [row["method"], row["topology"]]
        assert shown[2] == f"{row['validation_loss_mean']:.3f} ± {row['validation_loss_2sigma']:.3f}"
        assert shown[3:5] == [f"{row['train_loss_mean']:.3f}", f"{row['consensus_distance_mean']:.3f}"]
        expected = row["validation_loss_p_value"]
        assert shown[5] == ("" if pd.isna(expected) else f"{expected:.2g}")
    assert f"unigram entropy of {ours['unigram_entropy'].iloc[0]:.3f}" in discussion("gpt2_proxy")
