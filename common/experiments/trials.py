"""The trials of a table's sweep: a grid of learning rates, the runs it takes, and the values that they favour.

A grid is a range of integers k: the learning rates centre x 2^k, each with all combinations of the further axes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.stats import t

from common.cli import UsageError
from common.experiments.collect import read_cell
from common.experiments.definitions import meaning, parse_override
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, read_json, read_status
from common.experiments.sweeps import RATE, Candidate, Sweep, Tuned, folder_of
from common.experiments.table_file import Row
from common.experiments.tables import Cell, Table

LEVEL = 0.95


def first_grid(sweep: Sweep) -> range:
    """Return the grid that every sweep begins with; of an even number of rates, one more is below the centre."""
    low = -(sweep.rates // 2)
    return range(low, low + sweep.rates)


def grown(grid: range, edges: Collection[str]) -> range:
    """Return the grid with one more rate at these edges, "lowest" and "highest"."""
    return range(grid.start - ("lowest" in edges), grid.stop + ("highest" in edges))


@dataclass(frozen=True)
class Point:
    """A point of a row's grid: the power of two of its learning rate, and the overrides chosen along with it."""

    row: Row
    exponent: int
    choices: tuple[str, ...]

    @property
    def rate(self) -> float:
        """The learning rate, rounded to six digits, as it is written into overrides."""
        return float(f"{self.row.centre * 2.0**self.exponent:.6g}")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that make this trial."""
        return (f"{RATE}={self.rate}", *self.choices)

    @property
    def trial(self) -> Row:
        """The row with these values."""
        name, overrides = f"{self.row.name}/{folder_of(self.overrides)}", (*self.row.overrides, *self.overrides)
        return self.row.model_copy(update={"name": name, "overrides": overrides, "centre": None, "axes": {}})


def points_of(table: Table, row: Row, grid: Iterable[int]) -> list[Point]:
    """Return a row's points at these learning rates, from the centre outwards."""
    exponents = sorted(grid, key=lambda k: (abs(k), k))
    return [Point(row, k, choices) for k, choices in product(exponents, table.sweep.combinations(table.axes(row)))]


class Trials(Table):
    """Trials of a sweep as a table, so that they are made like any table's runs.

    Each row is a row to tune at a point of the grid; the seeds are the tuning seeds. A run whose loss diverged counts
    as a result.
    """

    settled: ClassVar[tuple[str, ...]] = ("finished", "diverged")

    @classmethod
    def of_table(cls, table: Table, grid: Iterable[int]) -> "Trials":
        """Return the trials at these rates, in <runs>/sweeps/<table>/<row>/<values>[/<variant>]/seed_<k>."""
        exponents, sweep = list(grid), table.sweep
        changes = {
            "runs": f"sweeps/{table.name}",
            "seeds": sweep.seeds,
            "metric": sweep.quantity,
            "columns": (),
            "sweep": None,
            "tuned": None,
            "rows": tuple(point.trial for row in table.tuned_rows for point in points_of(table, row, exponents)),
        }
        return cls.model_construct(**dict(table) | changes)  # row names contain a slash, which files may not have


# What the trials favour.


def read_trials(table: Table, grid: range, runs: Path) -> pd.DataFrame:
    """Read all trials of a grid, which must have ended; raise RunError for a broken one.

    Return a line for each, in the order of the grid, with the columns row, variant, point, seed, value (NaN if the run
    diverged), steps (how far it got), seconds and environment.
    """
    trials = Trials.of_table(table, grid)
    return pd.DataFrame(
        {"row": row, "variant": variant, "point": point, "seed": seed}
        | _read(trials, trials.cell(point.trial, seed, runs, variant))
        for row in table.tuned_rows
        for variant in table.variants or [None]
        for point in points_of(table, row, grid)
        for seed in trials.seeds
    )


def _read(trials: Trials, cell: Cell) -> dict[str, Any]:
    if read_status(cell.run_dir) == "diverged":
        environment = read_json(cell.run_dir / "environment.json")
        step = re.search(r"at step (\d+)", read_json(cell.run_dir / "summary.json")["error"])
        value, steps = math.nan, int(step[1]) if step else 0
    else:
        run = read_cell(trials, cell)
        environment, value, steps = run.environment, QUANTITIES[trials.metric].of(run), int(run.total("steps"))
        if value is None:
            raise RunError(f"{cell.run_dir}: has no {trials.metric}")
    began, ended = (datetime.fromisoformat(environment[key]) for key in ("start", "end"))
    value = value if math.isfinite(value) else math.nan
    return {"value": value, "steps": steps, "seconds": (ended - began).total_seconds(), "environment": environment}


@dataclass(frozen=True)
class Optimum:
    """The best rate by a parabola, and how well the trials determine it.

    rate:      where the parabola is best, rounded to three digits
    low, high: its 95 % interval by Fieller's theorem, never beyond the rates that were tried; from the seeds' scatter
               or from the means' misfit to the parabola, whichever is larger
    value:     the parabola's value at its optimum, mean over seeds
    scatter:   residual standard deviation of a trial, without the shift that a seed gives to all its trials
    parabola:  its coefficients in log lr, the highest power first
    span:      the lowest and the highest rate that it was fitted to
    """

    rate: float
    low: float
    high: float
    value: float
    scatter: float
    parabola: tuple[float, float, float]
    span: tuple[float, float]


def fit_optimum(
    rates: Sequence[float], values: Sequence[Sequence[float]], highest: bool, tried: Sequence[float]
) -> Optimum | None:
    """Fit a parabola by least squares, with a separate level for each seed.

    rates:   at least three, ascending
    values:  [rates, seeds], finite
    highest: whether the highest value is best, else the lowest
    tried:   all rates of the grid

    Return None if the parabola has no optimum among `rates`: it is flat, bent the other way, or best beyond them.
    """
    y, x = np.asarray(values, float), np.log(rates)
    middle = x.mean()  # coefficients and their covariances in x - middle, where they are well conditioned
    design = np.vander(x - middle, 3)
    (c, b, a), *_ = np.linalg.lstsq(design, y.mean(axis=1))
    flat = 1e-9 * np.abs(y).max()
    bottom = -b / (2 * c) if (-c if highest else c) > flat else math.inf
    if not x[0] <= bottom + middle <= x[-1]:
        return None
    fitted, means = design @ (c, b, a), y.mean(axis=1)
    residuals = y - y.mean(axis=0) - (fitted - y.mean())[:, None]
    freedom, points = y.size - y.shape[1] - 2, len(x)
    variance = float((residuals**2).sum() / freedom)
    of_means = variance / y.shape[1]
    if points > 3 and (misfit := float(((fitted - means) ** 2).sum() / (points - 3))) > of_means:
        of_means, freedom = misfit, points - 3  # the means are not a parabola: more seeds would not help
    covariance = np.linalg.inv(design.T @ design) * of_means
    low, high = _fieller(b, c, covariance[:2, :2], float(t.ppf((1 + LEVEL) / 2, freedom)))
    return Optimum(
        rate=float(f"{math.exp(bottom + middle):.3g}"),
        low=max(math.exp(min(low + middle, 700.0)), min(tried)),
        high=min(math.exp(min(high + middle, 700.0)), max(tried)),
        value=float(a + b * bottom + c * bottom**2),
        scatter=math.sqrt(variance),
        parabola=(float(c), float(b - 2 * c * middle), float(a - b * middle + c * middle**2)),
        span=(rates[0], rates[-1]),
    )


def _fieller(b: float, c: float, covariance: np.ndarray, quantile: float) -> tuple[float, float]:
    """Return the ends of the interval of v where the slope b + 2 c v may be 0; infinite if the curvature may be 0.

    covariance: of (c, b), [2, 2]
    """
    (of_c, of_bc), (_, of_b) = quantile**2 * covariance
    # (b + 2 c v)^2 <= quantile^2 Var(b + 2 c v)
    p, half_q, r = 4 * (c**2 - of_c), 2 * (b * c - of_bc), b**2 - of_b
    if p <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(half_q**2 - p * r, 0.0))
    return (-half_q - root) / p, (-half_q + root) / p


@dataclass(frozen=True)
class Choice:
    """Values that a method may take: a point and its mean, or the optimum of a parabola in the learning rate."""

    point: Point
    mean: float
    optimum: Optimum | None = None

    @property
    def candidate(self) -> Candidate:
        """The part that is kept in the sweep's file."""
        if self.optimum is None:
            return Candidate(overrides=self.point.overrides, mean=self.mean)
        return Candidate(overrides=(f"{RATE}={self.optimum.rate}", *self.point.choices), mean=self.mean)


@dataclass(frozen=True)
class Method:
    """A row to tune, in a variant of the table if it has any.

    values: {point: the quantity for each tuning seed, NaN if the run diverged}, in the order of the grid
    """

    table: Table
    row: Row
    variant: str | None
    grid: range
    values: Mapping[Point, Sequence[float]]

    @property
    def name(self) -> str:
        """The name under which its values are kept."""
        return self.table.method(self.row, self.variant)

    @cached_property
    def means(self) -> dict[Point, float]:
        """The means over seeds of the points whose trials all converged."""
        return {
            point: math.fsum(of) / len(of) for point, of in self.values.items() if not any(math.isnan(v) for v in of)
        }

    @cached_property
    def ranking(self) -> list[Choice]:
        """Its choices, best first; among equals, the one nearest to the centre first.

        They are the points whose trials all converged or, where a parabola is fitted, one for each combination of
        values on the further axes.
        """
        sign = -1 if self.table.sweep.best == "highest" else 1
        choices = sorted((Choice(*item) for item in self.means.items()), key=lambda choice: sign * choice.mean)
        if self.table.sweep.fit is None:
            return choices
        best_of: dict[tuple[str, ...], Choice] = {}
        for choice in choices:
            best_of.setdefault(choice.point.choices, choice)
        return sorted(map(self._fitted, best_of.values()), key=lambda choice: sign * choice.mean)

    def _fitted(self, best: Choice) -> Choice:
        """Return the optimum of a parabola through the converged rates around the best one, or `best` without one."""
        line, fit = self.line(best.point.choices), self.table.sweep.fit
        first = max(0, min(line.index(best.point) - fit // 2, len(line) - fit))
        near = line[first : first + fit]
        if len(near) < 3:
            return best
        tried, highest = [point.rate for point in self.values], self.table.sweep.best == "highest"
        optimum = fit_optimum([point.rate for point in near], [self.values[point] for point in near], highest, tried)
        return Choice(best.point, optimum.value, optimum) if optimum else best

    def line(self, choices: Sequence[str]) -> list[Point]:
        """Return the points that converged with these values on the other axes, rates ascending."""
        return sorted((point for point in self.means if point.choices == choices), key=lambda point: point.exponent)

    @property
    def edge(self) -> str | None:
        """The end of the grid at which the best learning rate lies; the lowest one if all diverged."""
        exponent = self.ranking[0].point.exponent if self.ranking else self.grid[0]
        return {self.grid[0]: "lowest", self.grid[-1]: "highest"}.get(exponent)

    @property
    def ends(self) -> tuple[str, ...]:
        """The axes of three or more numbers whose lowest or highest is best; 0 does not count as such an end."""
        found, chosen = [], meaning(self.ranking[0].point.choices)
        for key, values in self.table.axes(self.row).items():
            numbers = [parse_override(f"{key}={value}")[1] for value in values]
            if len(numbers) > 2 and all(isinstance(number, int | float) for number in numbers) and chosen[key] != 0:
                ends = {min(numbers): "lowest", max(numbers): "highest"}
                found += [f"{ends[chosen[key]]} {key}"] if chosen[key] in ends else []
        return tuple(found)

    @cached_property
    def tuned(self) -> Tuned:
        """The part that is kept in the sweep's file; raises UsageError if all trials diverged."""
        if not self.ranking:
            raise UsageError(f"{self.name}: every trial diverged; expected a lower centre than {self.row.centre:g}")
        best, *others = [choice.candidate for choice in self.ranking[:2]]
        values = [value for of in self.values.values() for value in of]
        optimum = self.ranking[0].optimum
        return Tuned(
            settings=self.table.settings(self.row, self.variant),
            centre=self.row.centre,
            axes=self.row.axes or None,
            best=best,
            runner_up=others[0] if others else None,
            trials=len(values),
            diverged=sum(map(math.isnan, values)),
            interval=optimum and (optimum.low, optimum.high),
            scatter=optimum and optimum.scatter,
            edge=self.edge,
            ends=self.ends or None,
        )


def methods_of(table: Table, grid: range, trials: pd.DataFrame) -> list[Method]:
    """Return the methods of a table with the values of their trials, as `read_trials` returns them."""
    methods: dict[tuple[Row, str | None], dict[Point, list[float]]] = {}
    for row, variant, point, value in trials[["row", "variant", "point", "value"]].itertuples(index=False, name=None):
        methods.setdefault((row, variant), {}).setdefault(point, []).append(value)
    return [Method(table, row, variant, grid, values) for (row, variant), values in methods.items()]
