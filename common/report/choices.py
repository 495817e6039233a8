"""The trials of a table's sweep that have ended, and the values that they speak for."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from common.cli import UsageError
from common.experiments.collect import read_cell
from common.experiments.definitions import meaning, parse_override
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, read_json, read_status
from common.experiments.sweeps import RATE, Candidate, Sweep, Tuned
from common.experiments.table_file import Row
from common.experiments.tables import Cell, Table
from common.experiments.trials import Grid, Point, Trials, at_point, points_of
from common.report.optimum import Optimum, fit_optimum


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
class Choice:
    """Values that a method may take: a point, or in its place the optimum of a parabola in the learning rate."""

    result: Result
    optimum: Optimum | None = None

    @property
    def candidate(self) -> Candidate:
        """What is kept of it."""
        if self.optimum is None:
            return Candidate(overrides=self.result.overrides, mean=self.result.mean)
        overrides = (f"{RATE}={self.optimum.rate}", *self.result.point.choices)
        return Candidate(overrides=overrides, mean=self.optimum.value)


@dataclass(frozen=True)
class Method:
    """A row to tune, in a variant of the table if it has any, and the results of the whole grid, in their order."""

    name: str
    row: Row
    variant: str | None
    settings: tuple[str, ...]
    sweep: Sweep
    axes: Mapping[str, Sequence[str]]
    grid: Grid
    results: tuple[Result, ...]

    @cached_property
    def ranking(self) -> list[Choice]:
        """Its choices, the best first; of equal ones the nearest to the centre.

        They are the points whose trials all converged or, where a parabola is fitted, one of each combination of
        values on the further axes.
        """
        ended = [result for result in self.results if result.mean is not None]
        points = sorted(ended, key=lambda result: self._loss(result.mean))
        if self.sweep.fit is None:
            return [Choice(point) for point in points]
        best_of: dict[tuple[str, ...], Result] = {}
        for point in points:
            best_of.setdefault(point.point.choices, point)
        choices = [Choice(point, self._fit(point)) for point in best_of.values()]
        return sorted(choices, key=lambda choice: self._loss(choice.candidate.mean))

    def _loss(self, value: float) -> float:
        return -value if self.sweep.best == "highest" else value

    def _fit(self, best: Result) -> Optimum | None:
        """Return the optimum by a parabola through the rates around the best one that converged."""
        line, fit = self.line(best), self.sweep.fit
        first = max(0, min(line.index(best) - fit // 2, len(line) - fit))
        near = line[first : first + fit]
        if len(near) < 3:
            return None
        values = [[trial.value for trial in result.trials] for result in near]
        tried = [result.rate for result in self.results]
        return fit_optimum([result.rate for result in near], values, self.sweep.best == "highest", tried)

    def line(self, best: Result) -> list[Result]:
        """Return the results that converged with the same values besides the rate, rates ascending."""
        alike = [r for r in self.results if r.point.choices == best.point.choices and r.mean is not None]
        return sorted(alike, key=lambda result: result.rate)

    @property
    def edge(self) -> str | None:
        """The end of the grid at which the best learning rate lies; the lowest one if all diverged."""
        exponent = self.ranking[0].result.point.exponent if self.ranking else self.grid.low
        return {self.grid.low: "lowest", self.grid.high: "highest"}.get(exponent)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the axes of three or more numbers of which the lowest or highest is best; below 0 there is none."""
        found, chosen = [], meaning(self.ranking[0].result.point.choices)
        for key, values in self.axes.items():
            numbers = [parse_override(f"{key}={value}")[1] for value in values]
            if len(numbers) > 2 and all(isinstance(number, int | float) for number in numbers) and chosen[key] != 0:
                ends = {min(numbers): "lowest", max(numbers): "highest"}
                found += [f"{ends[chosen[key]]} {key}"] if chosen[key] in ends else []
        return tuple(found)

    @cached_property
    def tuned(self) -> Tuned:
        """What is kept of it; raises UsageError if all trials diverged."""
        if not self.ranking:
            raise UsageError(f"{self.name}: every trial diverged; expected a lower centre than {self.row.centre:g}")
        best, *others = [choice.candidate for choice in self.ranking[:2]]
        trials = [trial for result in self.results for trial in result.trials]
        optimum = self.ranking[0].optimum
        return Tuned(
            settings=self.settings,
            centre=self.row.centre,
            axes=self.row.axes or None,
            best=best,
            runner_up=others[0] if others else None,
            trials=len(trials),
            diverged=sum(trial.value is None for trial in trials),
            interval=optimum and (optimum.low, optimum.high),
            scatter=optimum and optimum.scatter,
            edge=self.edge,
            ends=self.ends or None,
        )


def read_methods(table: Table, grid: Grid, runs: Path) -> list[Method]:
    """Read all trials of a grid, every one of which has ended; raises RunError for one that is broken."""
    trials = Trials.of_table(table, grid.exponents)
    return [
        Method(
            name=table.method(row, variant),
            row=row,
            variant=variant,
            settings=table.settings(row, variant),
            sweep=table.sweep,
            axes=table.axes(row),
            grid=grid,
            results=tuple(
                _result(trials, row, variant, point, runs) for point in points_of(table, row, grid.exponents)
            ),
        )
        for row in table.rows
        if row.centre is not None
        for variant in table.variants or [None]
    ]


def edges(methods: Sequence[Method]) -> set[str]:
    """Return the ends of the grid at which some method is best."""
    return {method.edge for method in methods} - {None}


def _result(trials: Trials, row: Row, variant: str | None, point: Point, runs: Path) -> Result:
    cells = [trials.cell(at_point(row, point), seed, runs, variant) for seed in trials.seeds]
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
