"""Recipes and tables compose without data; tests/experiments/test_hyperparameters.py compares them with the paper."""

from functools import cache
from pathlib import Path

import pytest

from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from gpt2.config import Gpt2Config
from gpt2.model import parameter_count
from gpt2.prepare import PUBLIC_TOKENS, PrepareArguments

TABLES = {name: load_table(name) for name in ("gpt2", "gpt2_fair")}
(ACCUM_AER,) = (row for row in TABLES["gpt2_fair"].rows if row.name == "accumadam_aer")
RECIPES = ["allreduce", "dadam_aer", "accumadam_aer"]


def composed(table: Table, row: Row) -> Gpt2Config:
    return compose(*table.cell(row, table.seeds[0], Path("runs")).overrides)


@cache
def compose(*overrides: str) -> Gpt2Config:
    return compose_config("gpt2", list(overrides))


# -- the paper's runs


def test_recipes_differ_in_method_topology_and_optimizer_only() -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer"}
    shared = [compose(f"experiment=gpt2/{name}").model_dump(exclude=free) for name in RECIPES]
    assert all(values == shared[0] for values in shared)


def test_the_largest_model_differs_from_the_recipe_in_size_and_shards_only() -> None:
    recipe, config = compose("experiment=gpt2/accumadam_aer"), compose("experiment=gpt2/xl_aer")
    assert (config.model.layers, config.model.width, config.model.heads) == (48, 1600, 25)
    assert (config.n, config.ranks, config.workers.per_host, config.sharded) == (16, 128, 1, True)
    assert config.training.batch_size % config.ranks == 0
    free = {
        "name": True,
        "run_dir": True,
        "model": {"name", "layers", "width", "heads"},
        "workers": {"per_host"},
        "parallel": {"ranks_per_worker", "shard"},
        "training": {"batch_size", "compile"},
    }
    assert config.model_dump(exclude=free) == recipe.model_dump(exclude=free)
    assert config.build_topology().world_size == 16


def test_data_of_the_paper() -> None:
    arguments = PrepareArguments(output="data/openwebtext")
    assert (arguments.source, arguments.tokenizer) == ("openwebtext", "gpt2")
    assert (arguments.validation_fraction, arguments.seed) == (0.0005, 2357)
    assert PUBLIC_TOKENS == {"train": 9_035_582_198, "val": 4_434_897}


# -- tables


def test_rows_of_the_proxy_differ_in_method_topology_and_optimizer_only() -> None:
    """Betas are the published ones, but for matched memory: there momentum forgets as much in a window of s steps."""
    table, free = TABLES["gpt2_fair"], {"name", "run_dir", "parallel", "topology", "optimizer"}
    configs = [composed(table, row) for row in table.rows]
    assert all(config.model_dump(exclude=free) == configs[0].model_dump(exclude=free) for config in configs)
    assert len({config.optimizer.weight_decay for config in configs}) == 1
    for config, row in zip(configs, table.rows, strict=True):
        accumulates = row.method.startswith("AccumAdam")
        recipe = compose(f"experiment=gpt2/{'accumadam_aer' if accumulates else 'allreduce'}").optimizer
        if "matched" in row.method:
            assert config.optimizer.betas[0] == pytest.approx(0.9**config.optimizer.accumulation_steps)
        else:
            assert config.optimizer.betas == recipe.betas
        if accumulates:
            assert config.optimizer.accumulation_steps == (8 if "published" in row.method else 4)


def test_the_proxy_has_the_recipes_structure() -> None:
    recipe, proxy = compose("experiment=gpt2/accumadam_aer"), composed(TABLES["gpt2_fair"], ACCUM_AER)
    changed = {"lr", "accumulation_steps"}
    assert proxy.optimizer.model_dump(exclude=changed) == recipe.optimizer.model_dump(exclude=changed)
    assert (proxy.parallel, proxy.topology) == (recipe.parallel, recipe.topology)
    assert (proxy.n, proxy.workers.per_host) == (recipe.n / 2, recipe.workers.per_host)
    assert proxy.schedule.name == recipe.schedule.name
    assert proxy.schedule.final_fraction == recipe.schedule.final_fraction
    assert proxy.training.clip == recipe.training.clip
    shape = proxy.model.shape
    assert 1e5 < parameter_count(shape) < 1e6
    assert (shape.bias, shape.dropout) == (False, 0.0)
    assert not proxy.evaluation.keep_average
    assert "evaluation.keep_average=false" in TABLES["gpt2_fair"].note
    assert "evaluation.keep_average=true" in TABLES["gpt2"].note
