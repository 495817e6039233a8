"""Recipes and tables compose without data; tests/experiments/test_hyperparameters.py compares them with the papers."""

from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from cnn.config import CnnConfig
from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config

TABLES = {name: load_table(name) for name in ("table3_fair", "exponential_fair", "exponential_methods")}


def composed(table: Table, row: Row) -> CnnConfig:
    return compose(*table.cell(row, table.seeds[0], Path("runs")).overrides)


@cache
def compose(*overrides: str) -> CnnConfig:
    return compose_config("cnn", list(overrides))


@pytest.mark.parametrize("servers", [4, 32])
def test_rates_of_the_exponential_graphs_follow_the_number_of_servers(servers: int) -> None:
    config = compose("experiment=exponential/imagenet", "topology=grid", f"workers.count={servers}")
    assert config.name == f"exponential_grid_{servers}"
    assert (config.ranks, config.training.batch_size) == (8 * servers, 32 * 8 * servers)
    assert config.lr == pytest.approx(0.1 * servers)  # 0.1 for 256 images
    assert config.schedule.warmup_start == 1 / (8 * servers)  # the rate of one GPU


def test_methods_and_networks_differ_in_nothing_else() -> None:
    table = TABLES["exponential_methods"]
    assert {row.workers for row in table.rows} == {8}
    assert len({(row.method, row.topology) for row in table.rows}) == 1 + 3 * 2
    row, *others = table.rows
    cells = [table.cell(row, 1, Path("runs"), network) for network in table.variants]
    configs = [compose(*cell.overrides) for cell in cells] + [composed(table, other) for other in others]
    networks = {config.model.architecture for config in configs}
    assert networks == {"resnet50", "mobilenet_v2", "efficientnet_b0"}
    free = {"name", "run_dir", "parallel", "topology", "optimizer", "model"}
    assert all(config.model_dump(exclude=free) == configs[0].model_dump(exclude=free) for config in configs)
    shared = ("lr", "lr_batch", "momentum", "weight_decay", "no_decay")
    assert len({tuple(getattr(config.optimizer, key) for key in shared) for config in configs}) == 1


@pytest.mark.parametrize("workers", [4, 8, 16, 32])
def test_the_grid_is_as_square_as_can_be(workers: int) -> None:
    config = compose_config("cnn", ["experiment=exponential/imagenet", "topology=grid", f"workers.count={workers}"])
    rows, cols = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8)}[workers]
    W = config.build_topology().matrix(0)
    assert np.count_nonzero(np.triu(W, 1)) == rows * (cols - 1) + cols * (rows - 1)


# -- proxies: the structure of the recipes


@pytest.mark.parametrize("name", ["table3_fair", "exponential_fair"])
def test_a_proxys_note_says_what_makes_it_harder(name: str) -> None:
    data, note = composed(TABLES[name], TABLES[name].rows[0]).data, TABLES[name].note
    assert f"{ceil(1797 * data.validation_fraction)} held-out images" in note
    assert (f"{100 * data.label_noise:g} % of the training labels are wrong" in note) == (data.label_noise > 0)
    assert ("different images, mostly of few classes" in " ".join(note.split())) == (data.partition == "dirichlet")
