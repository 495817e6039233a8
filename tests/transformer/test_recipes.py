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
CELLS = [(row, pair) for row in TABLES["table2"].rows for pair in TABLES["table2"].variants]
METHODS = {"AllReduce": "allreduce", "DAdam": "decentralized", "AccumAdam": "decentralized"}
OF_8_WORKERS = {"AllReduce": "allreduce", "DAdam": "dadam_8", "AccumAdam": "accumadam_8"}


@cache
def compose(*overrides: str) -> TransformerConfig:
    return compose_config("transformer", list(overrides))


def composed(table: Table, row: Row, pair: str) -> TransformerConfig:
    return compose(*table.cell(row, table.seeds[0], Path("runs"), pair).overrides)


@pytest.mark.parametrize(("row", "pair"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_every_cell_composes_to_what_its_labels_say(row: Row, pair: str) -> None:
    table = TABLES["table2"]
    config = composed(table, row, pair)
    assert (config.parallel.method, config.topology.name) == (METHODS[row.method], row.topology)
    assert config.optimizer.name == ("accumadam" if row.method == "AccumAdam" else "adam")
    assert (config.n, config.workers.per_host, config.seed) == (16, 4, table.seeds[0])
    assert f"{config.data.source}_{config.data.target}" == pair
    assert config.build_topology().world_size == 16


@pytest.mark.parametrize("method", OF_8_WORKERS)
def test_the_published_rows_of_the_proxy_have_the_values_for_8_workers(method: str) -> None:
    (row,) = (row for row in TABLES["table2_fair"].rows if row.method == f"{method}, published rate")
    ours = composed(TABLES["table2_fair"], row, "en_fr").optimizer
    theirs = compose(f"experiment=figure6/{OF_8_WORKERS[method]}").optimizer
    for key in ("betas", "lr", "accumulation_steps"):
        assert getattr(ours, key, None) == getattr(theirs, key, None)


@pytest.mark.parametrize(("experiment", "name"), [("dadam_16", "dadam_{}_16"), ("allreduce", "allreduce_16")])
@pytest.mark.parametrize("topology", ["hypercube", "one_peer_exponential"])
def test_runs_of_figure6_are_named_by_topology_and_workers(experiment: str, name: str, topology: str) -> None:
    choice = ["workers.count=16"] if experiment == "allreduce" else [f"topology={topology}"]
    config = compose(f"experiment=figure6/{experiment}", *choice)
    assert config.name == f"figure6_{name.format(topology)}"
    assert config.build_topology().world_size == 16


@pytest.mark.parametrize("name", TABLES)
def test_rows_differ_in_method_topology_and_optimizer_only(name: str) -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer"}
    for pair in TABLES[name].variants:
        shared = [composed(TABLES[name], row, pair).model_dump(exclude=free) for row in TABLES[name].rows]
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
