"""Recipes and tables compose without data; tests/experiments/test_hyperparameters.py compares them with the paper."""

import re
from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch

from common.experiments.definitions import ROOT
from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from common.optim import decay_groups
from common.planner import Cluster
from common.planner.memory import rank_memory
from gpt2.config import Gpt2Config
from gpt2.model import GPT2, parameter_count
from gpt2.prepare import PUBLIC_TOKENS, PrepareArguments

TABLES = {name: load_table(name) for name in ("gpt2", "gpt2_fair")}
ROWS = [(table, row) for table in TABLES.values() for row in table.rows]
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


def test_the_memory_that_is_asked_for_is_that_of_the_largest_model() -> None:
    """The command in the table's definition has the recipe's numbers, and what it says is what it predicts."""
    text = (ROOT / "results" / "definitions" / "tables" / "gpt2_xl.yaml").read_text()
    (command,) = re.findall(r"^#   python -m common.planner plan (.*)$", text, re.MULTILINE)
    given = dict(argument.split("=") for argument in command.split())
    config = compose("experiment=gpt2/xl_aer")
    payload_mb = 4 * parameter_count(config.model.shape) / 1e6
    assert given == {
        "hosts": str(config.n),
        "shards": str(config.ranks_per_worker),
        "payload_mb": f"{payload_mb:.1f}",
        "optimizer": config.optimizer.name,
        "topology": config.topology.name,
    }
    for shards, stated in ((8, "4.67 GB of each GPU"), (1, "37.4 GB (without")):
        there = Cluster(hosts=16, shards=shards, payload_mb=payload_mb)
        memory = rank_memory(there, config.optimizer.name, config.build_topology())
        assert f"{memory.total / 1000:.3g} GB " in stated
        assert stated in text.replace("\n# ", " ")


def test_matrices_decay_and_nothing_else() -> None:
    config = compose("experiment=gpt2/allreduce")
    with torch.device("meta"):
        model = GPT2(config.model.shape)
    decayed, rest = decay_groups(model, config.optimizer.weight_decay)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in rest["params"]) == (2 * 12 + 1) * 768  # the norms
    assert sum(p.numel() for p in decayed["params"]) == 12 * 12 * 768**2 + (50304 + 1024) * 768


def test_data_of_the_paper() -> None:
    arguments = PrepareArguments(output="data/openwebtext")
    assert (arguments.source, arguments.tokenizer) == ("openwebtext", "gpt2")
    assert (arguments.validation_fraction, arguments.seed) == (0.0005, 2357)
    assert PUBLIC_TOKENS == {"train": 9_035_582_198, "val": 4_434_897}


# -- tables


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: value.name)
def test_every_row_composes_to_what_its_labels_say(table: Table, row: Row) -> None:
    config = composed(table, row)
    method, workers = row.method.split(",")[0], 16 if table.name == "gpt2" else 8
    assert config.optimizer.name == {"AllReduce": "adamw", "DAdam": "adamw", "AccumAdam": "accumadamw"}[method]
    assert config.parallel.method == ("allreduce" if method == "AllReduce" else "decentralized")
    assert config.topology.name == row.topology
    assert (config.n, config.workers.per_host) == (workers, 4)
    assert config.seed == table.seeds[0]
    assert config.build_topology().world_size == workers
    assert config.training.batch_size % config.n == 0


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


@pytest.mark.parametrize("name", ["gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt2_proxy"])
def test_every_model_has_a_padded_vocabulary_and_the_recipes_form(name: str) -> None:
    model = compose(f"model={name}").model
    shape = model.shape
    assert ("gelu" in model.model_dump()) == (name != "gpt2_proxy")  # older runs lack the key, and can be resumed
    tokens = 1024 if name == "gpt2_proxy" else 50_257
    assert shape.vocabulary == 64 * ceil(tokens / 64)
    assert (shape.context, shape.bias, shape.dropout) == (128 if name == "gpt2_proxy" else 1024, False, 0.0)
    assert shape.width % shape.heads == 0
    assert shape.gelu == ("tanh" if name == "gpt2_proxy" else "exact")
    assert shape.width // shape.heads == (40 if name == "gpt2_proxy" else 64)
    assert np.iinfo(np.uint16).max >= shape.vocabulary - 1
