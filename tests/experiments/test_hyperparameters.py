"""Recipes have the published hyperparameters, which are data in results/paper/hyperparameters."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.experiments.hyperparameters import EXPERIMENTS, FOLDER, Family, differences, load_family

FAMILIES = {path.stem: load_family(path) for path in sorted(FOLDER.glob("*.yaml"))}
RECIPES = [(family, recipe) for family, file in FAMILIES.items() for recipe in file.recipes]
WHOLE = [(family, recipe) for family, recipe in RECIPES if not recipe.endswith("/base")]  # these contain the bases


@pytest.mark.parametrize(("family", "recipe"), WHOLE, ids=[recipe for _, recipe in WHOLE])
def test_a_recipe_has_the_published_values(family: str, recipe: str) -> None:
    found = differences(FAMILIES[family], recipe)
    assert not found, "\n".join([f"{recipe}:", *found])


def test_every_recipe_has_an_entry() -> None:
    """Experiments in folders repeat a paper's runs; those beside them, and proxies, are ours."""
    files = {str(path.relative_to(EXPERIMENTS).with_suffix("")) for path in EXPERIMENTS.glob("*/*.yaml")}
    entries = {recipe.partition("@")[0] for _, recipe in RECIPES}
    assert entries == {name for name in files if Path(name).name != "proxy"}


# -- what the comparison finds


def family(**values: dict[str, object]) -> Family:
    return Family.model_validate({"task": "gpt2", "sources": {"EXP": "theirs"}, "recipes": {"gpt2/allreduce": values}})


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optimizer.lr", {"value": 7e-4, "source": "EXP a"}, "optimizer.lr=0.0006: expected 0.0007 (EXP a)"),
        ("optimizer.betas", {"value": [0.9, 0.98], "source": "EXP a"}, "optimizer.betas=[0.9, 0.95]: expected [0.9, "),
        ("optimizer.rho", {"value": 1.0, "source": "EXP a"}, "optimizer.rho: no such key; expected 1.0 (EXP a)"),
        ("optimizer.lr", {"value": "unknown", "searched": "EXP a", "used": 1.0}, "expected 1.0 (unknown; searched EXP"),
    ],
)
def test_a_recipe_that_differs_is_named_with_its_key(key: str, value: dict[str, object], line: str) -> None:
    (found,) = differences(family(**{key: value}), "gpt2/allreduce")
    assert line in found


@pytest.mark.parametrize("value", [{"value": 1.0}, {"value": "unknown"}, {"value": 1.0, "source": "somebody"}])
def test_a_value_needs_its_source_and_an_unknown_one_where_it_was_searched(value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        family(**{"optimizer.lr": value})
