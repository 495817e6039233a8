"""The loop's benchmark: it runs, writes what it says, and judges by its own limit."""

import csv
from pathlib import Path

import pandas as pd
import pytest

from scripts.bench_loop import conclude, main


def test_writes_a_row_for_each_loop(tmp_path: Path) -> None:
    small = ["width=2", "batch_size=16", "steps=20", "rounds=2"]
    assert main([*small, f"output={tmp_path}"]) == 0
    rows = {row["loop"]: row for row in csv.DictReader((tmp_path / "loop.csv").open())}
    assert set(rows) == {"bare", "decentralized", "allreduce"}
    assert float(rows["bare"]["ratio_to_bare"]) == 1
    assert all(float(row["step_ms"]) > 0 for row in rows.values())
    assert "scripts.bench_loop width=2 batch_size=16 steps=20 rounds=2" in (tmp_path / "loop.md").read_text()


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.019, "1.9 % more than the bare one at worst: this meets"), (1.03, "misses")]
)
def test_the_verdict_is_that_of_the_slower_loop(ratio: float, verdict: str) -> None:
    frame = pd.DataFrame({"loop": ["bare", "decentralized", "allreduce"], "ratio_to_bare": [1.0, ratio, 1.0]})
    assert verdict in conclude(frame)
