"""How methods are tuned, and what was chosen: a table's `sweep`, and results/sweeps/<table>.yaml.

Every method gets equally many trials: a grid of learning rates around the centre that its row states. scripts.sweep
makes them; common.experiments.trials judges them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from common.cli import UsageError, nearest
from common.experiments.definitions import ROOT, Definition, Override, StrictSeed, load_definition, names_in
from common.experiments.quantities import QUANTITIES, Quantity

SWEEPS = ROOT / "results" / "sweeps"
RATE = "optimizer.lr"
FEWEST_SEEDS = 3  # for a parabola


class Sweep(Definition):
    """The trials that every method gets, and how they are judged."""

    quantity: str = Field(description="the quantity of finished runs to optimize")
    best: Literal["highest", "lowest"]
    seeds: tuple[StrictSeed, ...] = Field(min_length=1, description="integers, none of which the table reports")
    rates: int = Field(ge=3, description="number of learning rates in the first grid, a factor of 2 apart")
    extensions: NonNegativeInt = Field(description="how often the grid may grow while a method is best at an edge")
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


def override_of(rate: float) -> str:
    """Return the override that sets a learning rate."""
    return f"{RATE}={rate}"


class Candidate(Definition):
    """A rate, and the quantity's mean over the tuning seeds: measured in their trials, or read off the parabola."""

    overrides: tuple[Override, ...]
    mean: float

    @classmethod
    def of(cls, rate: float, mean: float) -> "Candidate":
        """Return this rate and its mean."""
        return cls(overrides=(override_of(rate),), mean=mean)


class Tuned(Definition):
    """What was chosen for a method.

    settings:  the overrides that all its trials shared
    runner_up: the second best rate; none if a parabola is fitted
    trials:    how many runs it was chosen from, including diverged ones
    interval:  the 95 % interval of the best rate, if it is a parabola's optimum
    scatter:   standard deviation of a trial about the parabola
    edge:      the end of the grid at which the best learning rate lies, if it does
    """

    settings: tuple[Override, ...]
    centre: float
    best: Candidate
    runner_up: Candidate | None = None
    trials: int
    diverged: int
    interval: tuple[float, float] | None = None
    scatter: float | None = None
    edge: Literal["lowest", "highest"] | None = None


class TunedFile(Definition):
    """The content of results/sweeps/<table>.yaml; methods are rows, or ROW/VARIANT."""

    sweep: Sweep
    methods: Mapping[str, Tuned]


def read_tuned(name: str, folder: Path = SWEEPS) -> TunedFile | None:
    """Return what was chosen for a table, None if its sweep has not been made; raise UsageError for a broken file."""
    if name not in names_in(folder):
        return None
    try:
        return load_definition(folder, name, TunedFile, "sweep")
    except UsageError as error:
        raise UsageError(f"{error}; remove this file and make it again with: {sweep_command(name)}") from None


def sweep_command(name: str) -> str:
    """Return the shell command that tunes a table."""
    return f"python -m scripts.sweep table={name}"
