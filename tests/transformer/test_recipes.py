"""Recipes and tables compose without data; tests/experiments/test_hyperparameters.py compares them with the paper."""

from pathlib import Path

from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from transformer.config import TransformerConfig


def composed(table: Table, row: Row) -> TransformerConfig:
    return compose_config("transformer", table.cell(row, table.seeds[0], Path("runs"), "en_fr").overrides)


def test_rows_differ_in_method_topology_and_optimizer_only() -> None:
    table, free = load_table("table2"), {"name", "run_dir", "parallel", "topology", "optimizer"}
    shared = [composed(table, row).model_dump(exclude=free) for row in table.rows]
    assert all(values == shared[0] for values in shared)


def test_the_proxys_note_says_what_its_data_and_runs_are() -> None:
    table = load_table("table2_fair")
    proxy, note = composed(table, table.rows[0]), " ".join(table.note.split())
    assert f"{proxy.data.held_out_lines} validation lines" in note
    assert f"numbers below {proxy.data.numbers:,}" in note
    assert f"a run of {proxy.training.steps:,} steps" in note
    assert f"every {proxy.evaluation.every} steps" in note
