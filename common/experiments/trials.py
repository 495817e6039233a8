"""The trials of a table's sweep: a grid of learning rates, and the runs it takes; common.report.choices judges them.

A grid is a range of integers k: the learning rates centre x 2^k, each with all combinations of the further axes.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from common.experiments.sweeps import RATE, Sweep, folder_of
from common.experiments.table_file import Row
from common.experiments.tables import Table


def first_grid(sweep: Sweep) -> range:
    """Return the grid that every sweep begins with; of an even number of rates one more lies below the centre."""
    low = -(sweep.rates // 2)
    return range(low, low + sweep.rates)


def grown(grid: range, edges: Collection[str]) -> range:
    """Return the grid with one more rate at these edges, "lowest" and "highest"."""
    return range(grid.start - ("lowest" in edges), grid.stop + ("highest" in edges))


@dataclass(frozen=True)
class Point:
    """A point of a row's grid: the power of two of its learning rate, and overrides that are chosen besides."""

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
    """Trials of a sweep as a table, so that they are made as any table's runs are.

    Each row is a row to tune at a point of the grid; the seeds are the tuning seeds. A run whose loss diverged is a
    result.
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
        return cls.model_construct(**dict(table) | changes)  # rows' names have a slash, which files may not have
