"""The trials of a table's sweep: the grid, the runs it takes, and which values they speak for."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UsageError
from common.report.collect import read_cell
from common.report.quantities import QUANTITIES
from common.report.registry import Cell, Table
from common.report.runs import RunError, read_json, read_status
from common.report.table_file import Row
from common.report.tuning import RATE, Candidate, Sweep, Tuned, folder_of

NEAR = 0.01  # of the best value: learning rates that are about as good


@dataclass(frozen=True)
class Grid:
    """Learning rates centre x 2^k, k from `low` to `high`, each with all combinations of the sweep's choices."""

    sweep: Sweep
    low: int
    high: int

    @classmethod
    def first(cls, sweep: Sweep) -> "Grid":
        """Return the grid that every sweep begins with; of an even number of rates one more lies below the centre."""
        low = -(sweep.rates // 2)
        return cls(sweep, low, low + sweep.rates - 1)

    def grown(self, edges: set[str]) -> "Grid":
        """Return the grid with one more rate at these edges, "lowest" and "highest"."""
        return Grid(self.sweep, self.low - ("lowest" in edges), self.high + ("highest" in edges))

    @property
    def points(self) -> list["Point"]:
        """All points, from the centre outwards."""
        exponents = sorted(range(self.low, self.high + 1), key=lambda k: (abs(k), k))
        return [Point(k, choices) for k, choices in product(exponents, self.sweep.combinations)]


@dataclass(frozen=True)
class Point:
    """A point of the grid: the power of two of its learning rate, and overrides that are chosen besides."""

    exponent: int
    choices: tuple[str, ...]

    def rate(self, centre: float) -> float:
        """Return the learning rate around this centre, rounded to six digits, as it is written into overrides."""
        return float(f"{centre * 2.0**self.exponent:.6g}")

    def overrides(self, centre: float) -> tuple[str, ...]:
        """Return the overrides that make this trial."""
        return (f"{RATE}={self.rate(centre)}", *self.choices)


class Trials(Table):
    """Trials of a sweep as a table, so that they are made as any table's runs are.

    Each row is a row to tune at a point of the grid; the seeds are the tuning seeds. A run whose loss diverged is a
    result.
    """

    settled: ClassVar[tuple[str, ...]] = ("finished", "diverged")

    @classmethod
    def of_table(cls, table: Table, points: Sequence[Point]) -> "Trials":
        """Return the trials at these points, in <runs>/sweeps/<table>/<row>/<values>[/<variant>]/seed_<k>."""
        rows = [_at(row, point) for row in table.rows if row.centre is not None for point in points]
        changes = {
            "runs": f"sweeps/{table.name}",
            "seeds": table.sweep.seeds,
            "metric": table.sweep.quantity,
            "columns": (),
            "sweep": None,
            "tuned": None,
            "rows": tuple(rows),
        }
        return cls.model_construct(**dict(table) | changes)  # rows' names have a slash, which files may not have


def _at(row: Row, point: Point) -> Row:
    """Return a row at a point of the grid."""
    values = point.overrides(row.centre)
    changes = {"name": f"{row.name}/{folder_of(values)}", "overrides": (*row.overrides, *values), "centre": None}
    return row.model_copy(update=changes)


@dataclass(frozen=True)
class Trial:
    """A run of a sweep that has ended; `value` is None if it diverged, `steps` how far it came."""

    seed: int
    value: float | None
    steps: int
    seconds: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What a point gave to a method: a trial for each tuning seed."""

    point: Point
    overrides: tuple[str, ...]
    rate: float
    trials: tuple[Trial, ...]

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None, which is worse than any number, if one diverged."""
        values = [trial.value for trial in self.trials]
        return None if None in values else math.fsum(values) / len(values)


@dataclass(frozen=True)
class Method:
    """A row to tune, in a variant of the table if it has any, and the results of the whole grid, in their order."""

    name: str
    row: Row
    variant: str | None
    settings: tuple[str, ...]
    grid: Grid
    results: tuple[Result, ...]

    @property
    def ranking(self) -> list[Result]:
        """The results that have a mean, the best first; of equal ones the nearest to the centre."""
        sign = -1 if self.grid.sweep.best == "highest" else 1
        return sorted((result for result in self.results if result.mean is not None), key=lambda r: sign * r.mean)

    @property
    def edge(self) -> str | None:
        """The end of the grid at which the best learning rate lies; the lowest one if all diverged."""
        exponent = self.ranking[0].point.exponent if self.ranking else self.grid.low
        return {self.grid.low: "lowest", self.grid.high: "highest"}.get(exponent)

    @property
    def by_rate(self) -> dict[float, float]:
        """{learning rate: mean with the best choices}, rates ascending, without those that diverged."""
        first: dict[float, float] = {}
        for result in self.ranking:
            first.setdefault(result.rate, result.mean)
        return dict(sorted(first.items()))

    @property
    def near(self) -> tuple[float, float]:
        """The lowest and the highest learning rate around the best one with means within NEAR of it."""
        best = self.ranking[0]
        rates = list(self.by_rate)
        good = [abs(mean - best.mean) <= NEAR * abs(best.mean) for mean in self.by_rate.values()]
        low = high = rates.index(best.rate)
        while low > 0 and good[low - 1]:
            low -= 1
        while high + 1 < len(rates) and good[high + 1]:
            high += 1
        return rates[low], rates[high]

    @property
    def tuned(self) -> Tuned:
        """What is kept of it; raises UsageError if all trials diverged."""
        if not self.ranking:
            raise UsageError(f"{self.name}: every trial diverged; expected a lower centre than {self.row.centre:g}")
        best, *others = [Candidate(overrides=r.overrides, mean=r.mean) for r in self.ranking[:2]]
        trials = [trial for result in self.results for trial in result.trials]
        return Tuned(
            settings=self.settings,
            centre=self.row.centre,
            best=best,
            runner_up=others[0] if others else None,
            trials=len(trials),
            diverged=sum(trial.value is None for trial in trials),
            edge=self.edge,
        )


def read_methods(table: Table, grid: Grid, runs: Path) -> list[Method]:
    """Read all trials of a grid, every one of which has ended; raises RunError for one that is broken."""
    trials = Trials.of_table(table, grid.points)
    return [
        Method(
            name=table.method(row, variant),
            row=row,
            variant=variant,
            settings=table.settings(row, variant),
            grid=grid,
            results=tuple(_result(trials, row, variant, point, runs) for point in grid.points),
        )
        for row in table.rows
        if row.centre is not None
        for variant in table.variants or [None]
    ]


def edges(methods: Sequence[Method]) -> set[str]:
    """Return the ends of the grid at which some method is best."""
    return {method.edge for method in methods} - {None}


def _result(trials: Trials, row: Row, variant: str | None, point: Point, runs: Path) -> Result:
    cells = [trials.cell(_at(row, point), seed, runs, variant) for seed in trials.seeds]
    ended = tuple(_read(trials, cell) for cell in cells)
    return Result(point, point.overrides(row.centre), point.rate(row.centre), ended)


def _read(trials: Trials, cell: Cell) -> Trial:
    if read_status(cell.run_dir) == "diverged":
        environment = read_json(cell.run_dir / "environment.json")
        message = read_json(cell.run_dir / "summary.json")["error"]
        step = re.search(r"at step (\d+)", message)
        value, steps = None, int(step[1]) if step else 0
    else:
        run = read_cell(trials, cell)
        environment, value, steps = run.environment, QUANTITIES[trials.metric].of(run), int(run.total("steps"))
        if value is None:
            raise RunError(f"{cell.run_dir}: has no {trials.metric}")
    began, ended = (datetime.fromisoformat(environment[key]) for key in ("start", "end"))
    finite = value is not None and math.isfinite(value)
    return Trial(cell.seed, value if finite else None, steps, (ended - began).total_seconds(), environment)
