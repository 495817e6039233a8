"""Gathers a table's finished runs, and what is missing."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.report.cli import UsageError
from common.report.columns import QUANTITIES
from common.report.registry import Cell, Table
from common.report.runs import Run, RunError, read_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """A cell without a usable run, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True)
class Collection:
    """A table's runs below the folder `root`: those that can be used, row by row, and the missing ones."""

    table: Table
    root: Path
    runs: Mapping[str, Sequence[Run]]
    missing: Sequence[Missing]

    @property
    def all_runs(self) -> list[Run]:
        """Every usable run, in the table's order."""
        return [run for runs in self.runs.values() for run in runs]

    def of(self, row: str, variant: str | None = None) -> list[Run]:
        """The usable runs of a row, of one variant or of all."""
        return [run for run in self.runs[row] if variant in (None, run.folder.parent.name)]

    def by_variant(self) -> list["Collection"]:
        """One collection for each variant, named after it; only this one if the table has none."""
        if not self.table.variants:
            return [self]
        return [self._only(variant) for variant in self.table.variants]

    def _only(self, variant: str) -> "Collection":
        table = self.table.model_copy(
            update={"name": f"{self.table.name}_{variant}", "title": f"{self.table.title}, {variant}", "variants": {}}
        )
        runs = {row: self.of(row, variant) for row in self.runs}
        return Collection(table, self.root, runs, [m for m in self.missing if m.cell.variant == variant])


def collect(table: Table, root: Path) -> Collection:
    """Reads the run of every cell.

    Runs that are unfinished, broken, without a number that the table needs, or made with other overrides than
    the table says are named in a warning and counted as missing. UsageError if no usable run is left.
    """
    runs: dict[str, list[Run]] = {row.name: [] for row in table.rows}
    missing = []
    for cell in table.cells(root):
        if not cell.run_dir.exists():
            missing.append(Missing(cell, "not run yet"))
            continue
        try:
            runs[cell.row.name].append(read_cell(table, cell))
        except RunError as error:
            logger.warning("skipped %s", error)
            missing.append(Missing(cell, str(error).removeprefix(f"{cell.run_dir}: ")))
    if not any(runs.values()):
        raise UsageError(
            f"runs={root}: no finished run in {root / table.runs}; make them with: {reproduce_command(table, root)}"
        )
    return Collection(table, root, runs, missing)


def reproduce_command(table: Table, root: Path) -> str:
    """The shell command that makes all missing runs."""
    runs = [] if root == Path("runs") else [f"runs={root}"]
    return shlex.join(["python", "-m", "scripts.reproduce", f"table={table.name}", *runs])


def read_cell(table: Table, cell: Cell) -> Run:
    """The finished run of a cell, with all numbers that the table needs; RunError if there is none."""
    run = read_run(cell.run_dir)
    check_overrides(cell, run.environment)
    for name in table.quantities:
        QUANTITIES[name].of(run)
    return run


def check_overrides(cell: Cell, environment: Mapping[str, object]) -> None:
    """RunError unless the overrides that the run in the cell's folder recorded are those of the cell."""
    recorded = environment.get("overrides")
    if not isinstance(recorded, list):
        raise RunError(f"{cell.run_dir}: environment.json: overrides={recorded!r}: expected a list")
    difference = cell.disagreement(recorded)
    if difference:
        raise RunError(f"{cell.run_dir}: holds something else: {difference}")
