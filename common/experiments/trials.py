"""The trials of a table's sweep: the grid, and the runs it takes; common.report.choices judges them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from common.experiments.sweeps import RATE, Sweep, folder_of
from common.experiments.table_file import Row
from common.experiments.tables import Table


@dataclass(frozen=True)
class Grid:
    """Learning rates centre x 2^k, k from `low` to `high`, each with all combinations of the further axes."""

    low: int
    high: int

    @classmethod
    def first(cls, sweep: Sweep) -> "Grid":
        """Return the grid that every sweep begins with; of an even number of rates one more lies below the centre."""
        low = -(sweep.rates // 2)
        return cls(low, low + sweep.rates - 1)

    def grown(self, edges: set[str]) -> "Grid":
        """Return the grid with one more rate at these edges, "lowest" and "highest"."""
        return Grid(self.low - ("lowest" in edges), self.high + ("highest" in edges))

    @property
    def exponents(self) -> list[int]:
        """The powers of two of its rates, from the centre outwards."""
        return sorted(range(self.low, self.high + 1), key=lambda k: (abs(k), k))


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


def points_of(table: Table, row: Row, exponents: Iterable[int]) -> list[Point]:
    """Return a row's points at these learning rates."""
    return [Point(k, choices) for k, choices in product(exponents, table.sweep.combinations(table.axes(row)))]


class Trials(Table):
    """Trials of a sweep as a table, so that they are made as any table's runs are.

    Each row is a row to tune at a point of the grid; the seeds are the tuning seeds. A run whose loss diverged is a
    result.
    """

    settled: ClassVar[tuple[str, ...]] = ("finished", "diverged")

    @classmethod
    def of_table(cls, table: Table, exponents: Sequence[int]) -> "Trials":
        """Return the trials at these rates, in <runs>/sweeps/<table>/<row>/<values>[/<variant>]/seed_<k>."""
        tuned = [row for row in table.rows if row.centre is not None]
        rows = [at_point(row, point) for row in tuned for point in points_of(table, row, exponents)]
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


def at_point(row: Row, point: Point) -> Row:
    """Return a row at a point of the grid."""
    values = point.overrides(row.centre)
    changes = {
        "name": f"{row.name}/{folder_of(values)}",
        "overrides": (*row.overrides, *values),
        "centre": None,
        "axes": {},
    }
    return row.model_copy(update=changes)
