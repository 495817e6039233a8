"""The loop's benchmark: it runs, writes what it says, and judges by its own limit."""

import csv
from pathlib import Path

import pytest

from scripts.benchmarks.loop import BenchArguments, conclude, main


def test_writes_a_row_for_each_loop(tmp_path: Path) -> None:
    small = ["width=2", "batches=16,32", "steps=20", "rounds=2"]
    assert main([*small, f"output={tmp_path}"]) == 0
    with (tmp_path / "loop.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = [(batch, loop) for batch in ("16", "32") for loop in ("decentralized", "allreduce")]
    assert [(row["batch_size"], row["loop"]) for row in rows] == expected
    for row in rows:
        assert float(row["step_ms"]) > 0
        assert float(row["bare_step_ms"]) > 0
    assert "scripts.benchmarks.loop width=2 batches=16,32 steps=20 rounds=2" in (tmp_path / "loop.md").read_text()


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.019, "1.9 % more than the bare one at worst: this meets"), (1.03, "misses")]
)
def test_the_verdict_is_that_of_the_slower_loop(ratio: float, verdict: str) -> None:
    rows = [{"batch_size": 64, "bare_step_ms": 20.0, "ratio_to_bare": value} for value in (ratio, 1.0)]
    assert verdict in conclude(rows, BenchArguments())[-1]
