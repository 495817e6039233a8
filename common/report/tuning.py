"""How learning rates are tuned, and what was chosen: a table's `sweep`, and results/sweeps/<table>.yaml.

Every method gets the same trials: a grid of learning rates around the centre that its row states, with all choices of
further overrides. scripts.sweep makes them; common.report.trials judges them.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, StrictInt, model_validator

from common.cli import nearest
from common.report.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.overrides import Override, parse_override
from common.report.quantities import QUANTITIES, Quantity

SWEEPS = ROOT / "results" / "sweeps"
RATE = "optimizer.lr"

Value = Annotated[str, Field(coerce_numbers_to_str=True)]


class Sweep(Definition):
    """The trials that every method gets, and how they are judged."""

    quantity: str = Field(description="what is optimized: a quantity of finished runs")
    best: Literal["highest", "lowest"]
    seeds: tuple[StrictInt, ...] = Field(min_length=1, description="integers, of which the table reports none")
    rates: int = Field(ge=3, description="learning rates of the first grid, a factor of 2 apart")
    extensions: NonNegativeInt = Field(description="how often the grid grows while a method is best at an edge")
    choices: dict[str, Annotated[tuple[Value, ...], Field(min_length=2)]] = Field(
        {}, description="further keys and their values, all combinations of which are tried"
    )

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        if self.quantity not in QUANTITIES:
            raise ValueError(f"quantity={self.quantity!r}: {nearest(self.quantity, QUANTITIES)}")
        if QUANTITIES[self.quantity].of_test_set:
            raise ValueError(f"quantity={self.quantity!r}: expected one of the validation set, not of the test set")
        for combination in self.combinations:
            for text in combination:
                parse_override(text)
        folders = [folder_of(combination) for combination in self.combinations]
        if len(set(folders)) < len(folders):
            raise ValueError("choices: expected each value once")
        if RATE in self.choices:
            raise ValueError(f"choices: {RATE} is already on the grid; expected other keys")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: expected each once")
        return self

    @property
    def of(self) -> Quantity:
        """The quantity that is optimized."""
        return QUANTITIES[self.quantity]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are tuned."""
        return (RATE, *self.choices)

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """The overrides of every combination of choices; one without any if there are none."""
        return list(product(*([f"{key}={value}" for value in values] for key, values in self.choices.items())))


def folder_of(overrides: Sequence[str]) -> str:
    """Return a folder's name for overrides: optimizer.lr=0.1 optimizer.betas=[0.9,0.99] is lr_0.1_betas_0.9_0.99."""
    last_keys = "_".join(re.sub(r"^[^=]*\.(?=[^=]*=)", "", text) for text in overrides)
    return re.sub(r"[^\w.-]+", "_", last_keys).strip("_")


class Candidate(Definition):
    """Overrides that were tried, and the mean of the quantity over the tuning seeds."""

    overrides: tuple[Override, ...]
    mean: float


class Tuned(Definition):
    """What was chosen for a method.

    settings:  the overrides that all its trials shared
    trials:    how many runs it was chosen from, those that diverged included
    edge:      the end of the grid at which the best learning rate lies, if it does
    """

    settings: tuple[Override, ...]
    centre: float
    best: Candidate
    runner_up: Candidate | None = None
    trials: int
    diverged: int
    edge: Literal["lowest", "highest"] | None = None


class TunedFile(Definition):
    """The content of results/sweeps/<table>.yaml; methods are rows, or ROW/VARIANT."""

    sweep: Sweep
    methods: Mapping[str, Tuned]


def read_tuned(name: str, folder: Path = SWEEPS) -> TunedFile | None:
    """Return what was chosen for a table, None if its sweep has not been made; UsageError for a broken file."""
    if name not in names_in(folder):
        return None
    content = read_definition(folder, name, "sweep")
    with explained(folder, name, TunedFile):
        return TunedFile.model_validate(content)


def sweep_command(name: str) -> str:
    """Return the shell command that tunes a table."""
    return f"python -m scripts.sweep table={name}"
