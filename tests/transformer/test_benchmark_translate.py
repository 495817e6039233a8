"""The benchmark of beam search: it runs, and both find the same."""

import csv
from pathlib import Path

import pytest

from tests.transformer.conftest import NEEDS_FAIRSEQ
from transformer.search import Search


@pytest.mark.slow
def test_writes_a_row_for_each_size_of_batches(run_folder: Path, tmp_path: Path) -> None:
    from scripts.benchmarks.translate import main

    small = [f"run={run_folder}", "sentences=1,7", "lines=9", "rounds=2", "base_sentences=0"]
    assert main([*small, f"output={tmp_path}"]) == 0
    with (tmp_path / "translate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["batch"], row["sentences"]) for row in rows] == [("trained", size, "9") for size in "17"]
    for row in rows:
        assert float(row["sentences_per_s"]) > 0
        assert float(row["fairseq_sentences_per_s"]) > 0
        assert float(row["same_percent"]) >= (100 if row["batch"] == "1" else 50)
    text = (tmp_path / "translate.md").read_text()
    assert "sentences=1,7 lines=9 base_sentences=0 rounds=2" in text
    assert "fairseq 0.12.2" in text


def test_the_base_model_and_its_sentences() -> None:
    pytest.importorskip("transformer.fairseq_compat", reason=NEEDS_FAIRSEQ, exc_type=ImportError)
    from scripts.benchmarks.translate import BenchArguments, base

    (setting,) = base(BenchArguments(base_sentences=5))
    assert setting.search == Search(extra_length=5)
    assert sum(p.numel() for p in setting.model.parameters()) == pytest.approx(63.1e6, rel=0.01)
    assert setting.sentences == 5
    assert setting.batches[0].shape == (5, 25)
    assert (setting.batches[0] == 2).sum(1).tolist() == [1] * 5  # EOS ends each
    assert not list(base(BenchArguments(base_sentences=0)))


def test_the_conclusion_is_that_of_the_slowest_row() -> None:
    from scripts.benchmarks.translate import conclude

    rows = [{"model": "trained", "batch": 1, "speedup": value} for value in (1.2, 2.0)]
    assert "1.20 times as fast" in conclude(rows)[-1]


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from scripts.benchmarks.translate import main

    assert main([f"run={tmp_path}/none", f"output={tmp_path}"]) == 2
    assert "none/config.yaml: cannot be read" in capsys.readouterr().err
