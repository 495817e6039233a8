"""The trials of a table's sweep: a grid of learning rates, the runs it takes, and the values that they favour.

A grid is a range of integers k: the learning rates centre x 2^k.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.stats import t

from common.cli import UsageError
from common.experiments.collect import read_cell
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, read_json, read_status
from common.experiments.sweeps import Candidate, Sweep, Tuned, override_of
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


def rates_of(row: Row, grid: Collection[int]) -> list[float]:
    """Return a row's learning rates from the centre outwards, rounded to six digits, as overrides have them."""
    return [float(f"{row.centre * 2.0**k:.6g}") for k in sorted(grid, key=lambda k: (abs(k), k))]


def trial_of(row: Row, rate: float) -> Row:
    """Return the row with this learning rate."""
    overrides = (*row.overrides, override_of(rate))
    return row.model_copy(update={"name": f"{row.name}/lr_{rate}", "overrides": overrides, "centre": None})


class Trials(Table):
    """Trials of a sweep as a table, so that they are made like any table's runs.

    Each row is a row to tune at a rate of the grid; the seeds are the tuning seeds. A run whose loss diverged counts
    as a result.
    """

    settled: ClassVar[tuple[str, ...]] = ("finished", "diverged")

    @classmethod
    def of_table(cls, table: Table, grid: Collection[int]) -> "Trials":
        """Return the trials at these rates, in <runs>/sweeps/<table>/<row>/lr_<rate>[/<variant>]/seed_<k>."""
        changes = {
            "runs": f"sweeps/{table.name}",
            "seeds": table.sweep.seeds,
            "metric": table.sweep.quantity,
            "columns": (),
            "sweep": None,
            "tuned": None,
            "rows": tuple(trial_of(row, rate) for row in table.tuned_rows for rate in rates_of(row, grid)),
        }
        return cls.model_construct(**dict(table) | changes)  # row names contain a slash, which files may not have


# What the trials favour.


def read_trials(table: Table, grid: range, runs: Path) -> pd.DataFrame:
    """Read all trials of a grid, which must have ended; raise RunError for a broken one.

    Return a line for each, in the order of the grid, with the columns row, variant, rate, seed, value (NaN if the run
    diverged), steps (how far it got), seconds (NaN if its end is not recorded) and environment.
    """
    trials = Trials.of_table(table, grid)
    return pd.DataFrame(
        {"row": row, "variant": variant, "rate": rate, "seed": seed}
        | _read(trials, trials.cell(trial_of(row, rate), seed, runs, variant))
        for row in table.tuned_rows
        for variant in table.variants or [None]
        for rate in rates_of(row, grid)
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
    began, ended = (pd.Timestamp(environment.get(key)) for key in ("start", "end"))  # no end: killed while it failed
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
class Method:
    """A row to tune, in a variant of the table if it has any.

    values: {rate: the quantity for each tuning seed, NaN if the run diverged}, in the order of the grid
    """

    table: Table
    row: Row
    variant: str | None
    grid: range
    values: Mapping[float, Sequence[float]]

    @property
    def name(self) -> str:
        """The name under which its values are kept."""
        return self.table.method(self.row, self.variant)

    @cached_property
    def means(self) -> dict[float, float]:
        """The means over seeds of the rates whose trials all converged."""
        return {rate: math.fsum(of) / len(of) for rate, of in self.values.items() if not any(map(math.isnan, of))}

    @cached_property
    def ranking(self) -> list[float]:
        """The rates whose trials all converged, best first; among equals, the one nearest to the centre first."""
        sign = -1 if self.table.sweep.best == "highest" else 1
        return sorted(self.means, key=lambda rate: sign * self.means[rate])

    @cached_property
    def optimum(self) -> Optimum | None:
        """The optimum of a parabola through the converged rates around the best one, if one is fitted and has any."""
        rates, fit = sorted(self.means), self.table.sweep.fit
        if fit is None or len(rates) < 3:
            return None
        first = max(0, min(rates.index(self.ranking[0]) - fit // 2, len(rates) - fit))
        near, highest = rates[first : first + fit], self.table.sweep.best == "highest"
        return fit_optimum(near, [self.values[rate] for rate in near], highest, [*self.values])

    @property
    def edge(self) -> str | None:
        """The end of the grid at which the best learning rate lies; the lowest one if all diverged."""
        lowest, highest = min(self.values), max(self.values)
        return {lowest: "lowest", highest: "highest"}.get(self.ranking[0] if self.ranking else lowest)

    @cached_property
    def tuned(self) -> Tuned:
        """The part that is kept in the sweep's file; raises UsageError if all trials diverged."""
        if not self.ranking:
            raise UsageError(f"{self.name}: every trial diverged; expected a lower centre than {self.row.centre:g}")
        best, *others = [Candidate.of(rate, self.means[rate]) for rate in self.ranking[:2]]
        values = [value for of in self.values.values() for value in of]
        optimum = self.optimum
        return Tuned(
            settings=self.table.settings(self.row, self.variant),
            centre=self.row.centre,
            best=Candidate.of(optimum.rate, optimum.value) if optimum else best,
            runner_up=others[0] if others and self.table.sweep.fit is None else None,
            trials=len(values),
            diverged=sum(map(math.isnan, values)),
            interval=optimum and (optimum.low, optimum.high),
            scatter=optimum and optimum.scatter,
            edge=self.edge,
        )


def methods_of(table: Table, grid: range, trials: pd.DataFrame) -> list[Method]:
    """Return the methods of a table with the values of their trials, as `read_trials` returns them."""
    methods: dict[tuple[Row, str | None], dict[float, list[float]]] = {}
    for row, variant, rate, value in trials[["row", "variant", "rate", "value"]].itertuples(index=False, name=None):
        methods.setdefault((row, variant), {}).setdefault(rate, []).append(value)
    return [Method(table, row, variant, grid, values) for (row, variant), values in methods.items()]
