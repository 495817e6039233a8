"""Recipes and tables compose without data; tests/experiments/test_hyperparameters.py compares them with the paper."""

from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from transformer.config import TransformerConfig

TABLES = {name: load_table(name) for name in ("table2", "table2_fair")}


@cache
def compose(*overrides: str) -> TransformerConfig:
    return compose_config("transformer", list(overrides))


def composed(table: Table, row: Row, pair: str) -> TransformerConfig:
    return compose(*table.cell(row, table.seeds[0], Path("runs"), pair).overrides)


@pytest.mark.parametrize("name", TABLES)
def test_rows_differ_in_method_topology_and_optimizer_only(name: str) -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer"}
    shared = [composed(TABLES[name], row, "en_fr").model_dump(exclude=free) for row in TABLES[name].rows]
    assert all(values == shared[0] for values in shared)


def test_the_proxy_of_table2_has_the_recipes_structure() -> None:
    for row in TABLES["table2"].rows:
        (proxy_row,) = (other for other in TABLES["table2_fair"].rows if other.name == row.name)
        recipe, proxy = composed(TABLES["table2"], row, "en_fr"), composed(TABLES["table2_fair"], proxy_row, "en_fr")
        assert (proxy.data.name, proxy.workers.kind, proxy.n) == ("number_names", "simulated", 8)
        same = ("label_smoothing", "decoding.beam", "decoding.length_penalty", "decoding.extra_length")
        same += ("schedule.name", "optimizer.name", "optimizer.eps", "parallel.method", "topology.name")
        assert [attrgetter(key)(proxy) for key in same] == [attrgetter(key)(recipe) for key in same]
        assert proxy.schedule.warmup == 0.04 * proxy.training.steps
        assert (proxy.model.variant, proxy.model.dropout) == ("fairseq", 0.1)
        assert (proxy.evaluation.keep_average, proxy.decoding.in_training) == (True, True)


def test_the_proxys_note_says_what_its_data_and_runs_are() -> None:
    table = TABLES["table2_fair"]
    proxy, note = composed(table, table.rows[0], "en_fr"), " ".join(table.note.split())
    assert f"{proxy.data.held_out_lines} validation lines" in note
    assert f"numbers below {proxy.data.numbers:,}" in note
    assert f"a run of {proxy.training.steps:,} steps" in note
    assert f"every {proxy.evaluation.every} steps" in note
