"""The benchmark of the loop: both tasks run and write what they say."""

import csv
from pathlib import Path

import pytest

from scripts.benchmarks.loop import BenchArguments, conclude, main, row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "settings", "batches"),
    [
        ("loop", ["batches=8,16", "overrides=model.width=2"], ["8", "16"]),
        ("gpt2", ["task=gpt2", "batches=1"], ["1"]),
    ],
)
def test_writes_a_row_for_each_loop(tmp_path: Path, table: str, settings: list[str], batches: list[str]) -> None:
    assert main([*settings, "steps=20", "rounds=2", f"output={tmp_path}"]) == 0
    with (tmp_path / f"{table}.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = [(batch, loop) for batch in batches for loop in ("decentralized", "allreduce")]
    assert [(row["batch_size"], row["loop"]) for row in rows] == expected
    for values in rows:
        assert float(values["step_ms"]) > 0
        assert float(values["bare_step_ms"]) > 0
        ratio = float(values["step_ms"]) / float(values["bare_step_ms"])
        assert float(values["ratio_to_bare"]) == pytest.approx(ratio, rel=0.5)  # medians of other things
    assert f"scripts.benchmarks.loop {' '.join(settings)} steps=20 rounds=2" in (tmp_path / f"{table}.md").read_text()


def test_a_row_holds_medians_over_the_rounds() -> None:
    values = row(8, "allreduce", [(0.1, 0.2, 0.5), (0.2, 0.2, 1.0), (0.4, 0.2, 2.0)])
    assert (values["step_ms"], values["bare_step_ms"], values["ratio_to_bare"], values["spread"]) == (200, 200, 1, 1.5)


def test_the_conclusion_has_the_ratio_of_every_row() -> None:
    rows = [row(64, "decentralized", [(0.02, 0.02, 1.019)] * 2), row(64, "allreduce", [(0.02, 0.02, 0.99)] * 2)]
    said = conclude(rows, BenchArguments(), parameters=1_100_000)
    assert said == [
        "cnn, 1.10 M parameters, fp32, 7 rounds of 100 steps.",
        "With a batch of 64 (20 ms a step) ours takes 1.0190 (decentralized) and 0.9900 (allreduce) times as long.",
    ]
