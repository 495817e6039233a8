"""The benchmark of GPT-2's training: it runs, writes what it says, and judges by its own limit."""

import csv
import re
from pathlib import Path

import pytest

from common.training.compose import compose_config
from scripts.benchmarks.gpt2 import BenchArguments, conclude, main, row


def test_writes_a_row_for_each_method(tmp_path: Path) -> None:
    small = ["batch_size=1", "steps=20", "rounds=2"]
    assert main([*small, f"output={tmp_path}"]) == 0
    rows = {row["loop"]: row for row in csv.DictReader((tmp_path / "gpt2.csv").open())}
    assert set(rows) == {"decentralized", "allreduce"}
    for values in rows.values():
        assert float(values["tokens_per_s"]) > 0
        ratio = float(values["tokens_per_s"]) / float(values["bare_tokens_per_s"])
        assert float(values["ratio_to_bare"]) == pytest.approx(ratio, rel=0.5)  # medians of other things
    assert "scripts.benchmarks.gpt2 batch_size=1 steps=20 rounds=2" in (tmp_path / "gpt2.md").read_text()


def test_tokens_per_second_are_those_of_the_median_step() -> None:
    values = row("allreduce", [(0.1, 0.2, 0.5), (0.2, 0.2, 1.0), (0.4, 0.2, 2.0)], tokens=1000)
    assert (values["tokens_per_s"], values["bare_tokens_per_s"], values["ratio_to_bare"]) == (5000, 5000, 1)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.981, "98.1 % of .* this meets"), (0.97, "97.0 % .* this misses")])
def test_the_verdict_is_that_of_the_slower_method(ratio: float, verdict: str) -> None:
    rows = [{"ratio_to_bare": 1.01}, {"ratio_to_bare": ratio}]
    said = " ".join(conclude(rows, BenchArguments(), compose_config("gpt2", [])))
    assert re.search(verdict, said)
