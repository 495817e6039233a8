"""The benchmark of preparing tokens: it runs and writes what it says."""

import csv
from pathlib import Path

import pytest

from scripts.benchmarks.tokenize import BenchArguments, conclude, main, row


def test_writes_a_row_for_each(tmp_path: Path) -> None:
    small = ["tokenizer=bpe_300", "documents=12", "copies=2", "rounds=2"]
    assert main([*small, f"output={tmp_path}"]) == 0
    rows = {row["what"]: row for row in csv.DictReader((tmp_path / "tokenize.csv").open())}
    assert set(rows) == {"prepare", "tiktoken"}
    assert float(rows["tiktoken"]["ratio_to_tiktoken"]) == 1
    assert float(rows["prepare"]["ratio_to_tiktoken"]) > 0
    written = (tmp_path / "tokenize.md").read_text()
    assert "scripts.benchmarks.tokenize tokenizer=bpe_300 documents=12 copies=2 rounds=2" in written
    assert "tiktoken " in written


def test_rates_and_ratios() -> None:
    seconds = {"prepare": [2.0, 4.0, 8.0], "tiktoken": [2.0, 3.0, 4.0]}
    values = row("prepare", seconds, tokens=8_000_000, megabytes=32)
    assert (values["tokens_per_s"], values["mb_per_s"], values["ratio_to_tiktoken"]) == (2e6, 8, 0.75)


def test_the_conclusion_has_the_ratio() -> None:
    rows = [{"what": "prepare", "ratio_to_tiktoken": 0.86}, {"what": "tiktoken", "ratio_to_tiktoken": 1.0}]
    assert "86 % of tiktoken's own" in conclude(rows, BenchArguments(), 10, 1.0)[-1]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe_9", "gpt5"])
def test_a_tokenizer_that_is_none_of_tiktokens_is_refused(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"tokenizer={tokenizer}", "documents=2", "copies=1", f"output={tmp_path}"]) == 2
    assert f"error: tokenizer={tokenizer}: " in capsys.readouterr().err
