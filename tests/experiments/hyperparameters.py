"""Published hyperparameters, results/paper/hyperparameters/<family>.yaml, and how a recipe differs from them."""

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from common.experiments.definitions import Definition
from common.experiments.tables import load_table
from common.launch.compose import CONFIGS, compose_config
from common.report.published import PAPER

FOLDER = PAPER / "hyperparameters"
EXPERIMENTS = CONFIGS / "experiment"


class Value(Definition):
    """A published value, or "unknown" and what the recipe has instead.

    within:   relative tolerance, where the source has a rounded number
    searched: where an unknown value was looked for
    used:     the recipe's stand-in for an unknown value
    """

    value: Any
    source: str | None = None
    within: float = 1e-9
    searched: str | None = None
    used: Any = None

    @model_validator(mode="after")
    def _check(self) -> "Value":
        unknown = self.value == "unknown"
        given = (self.source is not None, self.searched is not None, self.used is not None)
        if given != (not unknown, unknown, unknown):
            raise ValueError('expected a value with its source, or "unknown" with what is used and what was searched')
        return self

    @property
    def expected(self) -> Any:
        """What the recipe must have."""
        return self.used if self.value == "unknown" else self.value

    def is_met_by(self, found: Any) -> bool:
        """Return whether this is the value, numbers in lists included."""
        wanted, there = ([v] if not isinstance(v, list) else v for v in (self.expected, found))
        return len(wanted) == len(there) and all(map(self._alike, wanted, there))

    def _alike(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, int | float) and isinstance(found, int | float) and type(found) is not bool:
            return type(wanted) is not bool and abs(found - wanted) <= self.within * abs(wanted)
        return type(wanted) is type(found) and wanted == found


class Family(Definition):
    """The content of a file: the recipes of one folder of configs/experiment.

    sources: what the short names in `source` and `searched` stand for
    shared:  values that all recipes have, unless they have their own
    recipes: by experiment; EXPERIMENT@VARIANT is a variant of the table that is named like the folder
    """

    task: Literal["cnn", "transformer", "gpt2"]
    sources: dict[str, str]
    shared: dict[str, Value] = Field(default_factory=dict)
    recipes: dict[str, dict[str, Value]]

    @model_validator(mode="after")
    def _sources_are_known(self) -> "Family":
        for values in (self.shared, *self.recipes.values()):
            for key, value in values.items():
                for reference in (value.source or value.searched or "").split("; "):
                    if reference.split()[0] not in self.sources:
                        raise ValueError(f"{key}: {reference!r}: expected it to begin with one of {list(self.sources)}")
        return self

    def values(self, recipe: str) -> Mapping[str, Value]:
        """Return what is published of a recipe, by key."""
        return self.shared | self.recipes[recipe]


def load_family(path: Path) -> Family:
    """Read a file; raises ValidationError if it is wrong."""
    return Family.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def differences(family: Family, recipe: str) -> list[str]:
    """Return a line for each key in which the recipe is not what is published."""
    experiment, _, variant = recipe.partition("@")
    overrides = load_table(experiment.split("/")[0]).variants[variant] if variant else ()
    config = compose_config(family.task, [f"experiment={experiment}", *overrides]).model_dump(mode="json")
    return list(_differences(config, family.values(recipe)))


def _differences(config: dict[str, Any], values: Mapping[str, Value]) -> Iterator[str]:
    for key, value in values.items():
        expected = f"expected {value.expected} ({value.source or f'unknown; searched {value.searched}'})"
        *path, last = key.split(".")
        holder = reduce(lambda part, name: part.get(name, {}) if isinstance(part, dict) else {}, path, config)
        if not isinstance(holder, dict) or last not in holder:
            yield f"{key}: no such key; {expected}"
        elif not value.is_met_by(holder[last]):
            yield f"{key}={holder[last]}: {expected}"
