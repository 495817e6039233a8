"""How methods are tuned, and what was chosen: a table's `sweep`, and results/sweeps/<table>.yaml.

Every method gets equally many trials: a grid of learning rates around the centre that its row states, with all
combinations of the values on further axes. scripts.sweep makes them; common.experiments.trials judges them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, NonNegativeInt, model_validator

from common.cli import nearest
from common.experiments.definitions import (
    ROOT,
    Definition,
    Override,
    StrictSeed,
    check_override,
    load_definition,
    names_in,
)
from common.experiments.quantities import QUANTITIES, Quantity

SWEEPS = ROOT / "results" / "sweeps"
RATE = "optimizer.lr"
FEWEST_SEEDS = 3  # for a parabola


def _written(value: Any) -> str:
    """Return a value as it is written in overrides: null, true, 0.1, [0.9,0.99]."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _check_axes(axes: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    for key, values in axes.items():
        if len({folder_of([check_override(f"{key}={value}")]) for value in values}) < len(values):
            raise ValueError(f"{key}: expected each value once, got {', '.join(values)}")
    if RATE in axes:
        raise ValueError(f"{RATE} is already on the grid; expected other keys")
    return axes


Values = Annotated[tuple[Annotated[str, BeforeValidator(_written)], ...], Field(min_length=2)]
Axes = Annotated[dict[str, Values], AfterValidator(_check_axes)]


class Sweep(Definition):
    """The trials that every method gets, and how they are judged."""

    quantity: str = Field(description="the quantity of finished runs to optimize")
    best: Literal["highest", "lowest"]
    seeds: tuple[StrictSeed, ...] = Field(min_length=1, description="integers, none of which the table reports")
    rates: int = Field(ge=3, description="number of learning rates in the first grid, a factor of 2 apart")
    extensions: NonNegativeInt = Field(description="how often the grid may grow while a method is best at an edge")
    axes: Axes = Field(
        {},
        validation_alias=AliasChoices("axes", "choices"),
        serialization_alias="choices",  # the name in kept files
        description="further keys to tune and their values, the usual one first; rows may have others",
    )

    fit: Literal[3, 5] | None = Field(
        None, description="fit a parabola to this many rates around the best and take its optimum; null: the best rate"
    )

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        if self.quantity not in QUANTITIES:
            raise ValueError(f"quantity={self.quantity!r}: {nearest(self.quantity, QUANTITIES)}")
        if self.of.of_test_set:
            raise ValueError(f"quantity={self.quantity!r}: expected one of the validation set, not of the test set")
        if self.best != (better := "highest" if self.of.higher_is_better else "lowest"):
            raise ValueError(f"best={self.best}: expected {better}, which is better of {self.quantity}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: expected each once")
        if self.fit and len(self.seeds) < FEWEST_SEEDS:
            raise ValueError(f"fit={self.fit}: expected at least {FEWEST_SEEDS} seeds, got {len(self.seeds)}")
        if self.fit and self.rates < self.fit:
            raise ValueError(f"fit={self.fit}: expected at least as many rates, got {self.rates}")
        return self

    @property
    def of(self) -> Quantity:
        """The quantity that is optimized."""
        return QUANTITIES[self.quantity]

    def combinations(self, axes: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
        """Return overrides for all combinations of the values on these axes; without axes, one empty combination."""
        return list(product(*([f"{key}={value}" for value in values] for key, values in axes.items())))


def folder_of(overrides: Sequence[str]) -> str:
    """Return a folder's name for overrides: optimizer.lr=0.1 optimizer.betas=[0.9,0.99] is lr_0.1_betas_0.9_0.99."""
    last_keys = "_".join(re.sub(r"^[^=]*\.(?=[^=]*=)", "", text) for text in overrides)
    return re.sub(r"[^\w.-]+", "_", last_keys).strip("_")


class Candidate(Definition):
    """Overrides, and the quantity's mean over the tuning seeds: measured in their trials, or read off the parabola."""

    overrides: tuple[Override, ...]
    mean: float


class Tuned(Definition):
    """What was chosen for a method.

    settings:  the overrides that all its trials shared
    axes:      further axes of its row, in place of the sweep's
    trials:    how many runs it was chosen from, including diverged ones
    interval:  the 95 % interval of the best rate, if it is a parabola's optimum
    scatter:   standard deviation of a trial about the parabola
    edge:      the end of the grid at which the best learning rate lies, if it does
    ends:      "lowest KEY" or "highest KEY" for other keys whose best value is the end of three or more numbers
    """

    settings: tuple[Override, ...]
    centre: float
    axes: Axes | None = None
    best: Candidate
    runner_up: Candidate | None = None
    trials: int
    diverged: int
    interval: tuple[float, float] | None = None
    scatter: float | None = None
    edge: Literal["lowest", "highest"] | None = None
    ends: tuple[str, ...] | None = None


class TunedFile(Definition):
    """The content of results/sweeps/<table>.yaml; methods are rows, or ROW/VARIANT."""

    sweep: Sweep
    methods: Mapping[str, Tuned]


def read_tuned(name: str, folder: Path = SWEEPS) -> TunedFile | None:
    """Return what was chosen for a table, None if its sweep has not been made; raise UsageError for a broken file."""
    return load_definition(folder, name, TunedFile, "sweep") if name in names_in(folder) else None


def sweep_command(name: str) -> str:
    """Return the shell command that tunes a table."""
    return f"python -m scripts.sweep table={name}"
