"""Recipes compose without data; tests/experiments/test_hyperparameters.py compares them with the paper."""

from functools import cache

from common.launch.compose import compose_config
from gpt2.config import Gpt2Config
from gpt2.prepare import PUBLIC_TOKENS, PrepareArguments


@cache
def compose(*overrides: str) -> Gpt2Config:
    return compose_config("gpt2", list(overrides))


def test_recipes_differ_in_method_topology_and_optimizer_only() -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer"}
    shared = [
        compose(f"experiment=gpt2/{name}").model_dump(exclude=free)
        for name in ("allreduce", "dadam_aer", "accumadam_aer")
    ]
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
