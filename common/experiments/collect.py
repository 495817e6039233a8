"""Gathers a table's finished runs, and what is missing."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import pandas as pd

from common.cli import UsageError
from common.experiments.columns import Column
from common.experiments.runs import FinishedRun, RunError, has_run, read_overrides, read_run, read_scores
from common.experiments.tables import Cell, Table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """A cell without a usable run, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True)
class Collection:
    """A table's usable runs below the folders `roots`, row by row, and the cells without one."""

    table: Table
    roots: tuple[Path, ...]
    runs: Mapping[str, Sequence[FinishedRun]]
    missing: Sequence[Missing]
    variant_of: Mapping[Path, str | None]

    @property
    def root(self) -> Path:
        """The folder in which missing runs would be made: the first."""
        return self.roots[0]

    @property
    def all_runs(self) -> list[FinishedRun]:
        """Every usable run, in the table's order."""
        return [run for runs in self.runs.values() for run in runs]

    def of(self, row: str, variant: str | None = None) -> list[FinishedRun]:
        """Return the usable runs of a row, of one variant or of all."""
        return [run for run in self.runs[row] if variant in (None, self.variant_of[run.folder])]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A line for each usable run: row, variant, seed, and the table's quantities; None where a run may lack one."""
        lines = [
            {"row": row, "variant": self.variant_of[run.folder], "seed": run.seed}
            | {quantity.name: quantity.of(run) for quantity in self.table.quantities}
            for row, runs in self.runs.items()
            for run in runs
        ]
        names = ["row", "variant", "seed", *(quantity.name for quantity in self.table.quantities)]
        return pd.DataFrame(lines, columns=names, dtype=object)  # numbers would have NaN (diverged) in place of None

    def values(self, column: Column) -> dict[str, dict[tuple[str | None, int], float | None]]:
        """Return {row: {(variant, seed): the column's quantity}}, an empty one for rows without runs."""
        frame = self.frame if column.variant is None else self.frame[self.frame["variant"] == column.variant]
        found = {
            row: dict(zip(zip(of["variant"], of["seed"], strict=True), of[column.quantity.name], strict=True))
            for row, of in frame.groupby("row", sort=False)
        }
        return {row.name: found.get(row.name, {}) for row in self.table.rows}

    def by_variant(self) -> list["Collection"]:
        """Return a collection for each variant, named after it; only this one if the table has none."""
        if not self.table.variants:
            return [self]
        return [self._only(variant) for variant in self.table.variants]

    def of_rows(self, rows: Sequence[str], title: str) -> "Collection":
        """Return the collection of these rows alone, under another title."""
        kept = tuple(row for row in self.table.rows if row.name in rows)
        return replace(
            self,
            table=self.table.model_copy(update={"rows": kept, "title": title}),
            runs={row.name: self.runs[row.name] for row in kept},
            missing=[m for m in self.missing if m.cell.row.name in rows],
        )

    def _only(self, variant: str) -> "Collection":
        table = self.table.model_copy(
            update={"name": f"{self.table.name}_{variant}", "title": f"{self.table.title}, {variant}", "variants": {}}
        )
        runs = {row: self.of(row, variant) for row in self.runs}
        missing = [m for m in self.missing if m.cell.variant == variant]
        return Collection(table, self.roots, runs, missing, self.variant_of)


def collect(table: Table, *roots: Path, allow_empty: bool = False) -> Collection:
    """Read the run of every cell from the first of these folders that has a usable one.

    Runs that are unfinished, broken, without a number that the table needs, or made with other overrides than the
    table's are named in a warning and counted as missing. Raises UsageError if no usable run is left, or if the table
    is not tuned, unless allow_empty.
    """
    if table.untuned and not allow_empty:
        raise UsageError(table.untuned)
    runs: dict[str, list[FinishedRun]] = {row.name: [] for row in table.rows}
    variant_of: dict[Path, str | None] = {}
    missing = []
    for cells in zip(*(table.cells(root) for root in roots), strict=True):
        run, reasons = None, [table.untuned] if table.untuned else []
        if not reasons:
            run, reasons = _first_usable(table, cells)
        if run is None:
            missing.append(Missing(cells[0], "; ".join(reasons) or "not run yet"))
        else:
            runs[cells[0].row.name].append(run)
            variant_of[run.folder] = cells[0].variant
    if not any(runs.values()) and not allow_empty:
        where = " or ".join(str(root / table.runs) for root in roots)
        raise UsageError(
            f"runs={','.join(map(str, roots))}: no finished run in {where}; "
            f"make them with: {reproduce_command(table, roots[0])}"
        )
    return Collection(_recorded(table, runs, variant_of), roots, runs, missing, variant_of)


def _recorded(table: Table, runs: Mapping[str, Sequence[FinishedRun]], variant_of: Mapping[Path, str | None]) -> Table:
    """Return the table without columns of quantities that runs may do without and that none of these has."""

    def is_shown(column: Column) -> bool:
        if not column.of_runs or column.quantity.absent is None:
            return True
        own = [run for of_row in runs.values() for run in of_row if column.variant in (None, variant_of[run.folder])]
        return any(column.quantity.of(run) is not None for run in own)

    return table.model_copy(update={"columns": tuple(column for column in table.columns if is_shown(column))})


def _first_usable(table: Table, cells: Sequence[Cell]) -> tuple[FinishedRun | None, list[str]]:
    """Return the first run that can be read and why those before it cannot; each of these gets a warning."""
    reasons: list[str] = []
    for cell in cells:
        try:
            if has_run(cell.run_dir):
                return read_cell(table, cell), reasons
        except RunError as error:
            logger.warning("skipped %s", error)
            reasons.append(str(error).removeprefix(f"{cell.run_dir}: "))
    return None, reasons


def reproduce_command(table: Table, root: Path) -> str:
    """Return the shell command that makes all missing runs."""
    runs = [] if root == Path("runs") else [f"runs={root}"]
    return shlex.join(["python", "-m", "scripts.reproduce", f"table={table.name}", *runs])


def score_arguments(table: Table, run: Path, models: Literal["last", "all"] = "last") -> list[str]:
    """Return Python's arguments for scoring the test set with a run's last model, or with all that it kept.

    The list is empty if the table needs no such scores or the run has them.
    """
    if not any(quantity.of_test_set for quantity in table.quantities):
        return []
    scored = (read_scores(run) or "").splitlines()
    if any(line.startswith("step_" if models == "all" else "last") for line in scored):
        return []
    return ["-m", f"{table.task}.evaluate", f"run={run}", f"models={models}"]


def read_cell(table: Table, cell: Cell) -> FinishedRun:
    """Return the finished run of a cell with all numbers that the table needs; raises RunError if there is none."""
    run = replace(read_run(cell.run_dir), target=table.target)
    check_overrides(cell, run.environment)
    run.total("workers")
    for quantity in table.quantities:
        quantity.of(run)
    return run


def check_overrides(cell: Cell, environment: Mapping[str, object]) -> None:
    """Raise RunError unless the run in the cell's folder recorded the cell's overrides and emulated hosts."""
    recorded = read_overrides(cell.run_dir, environment)
    hosts, expected = environment.get("emulated"), cell.emulated and cell.emulated.model_dump()
    if expected is not None and {key: (hosts or {}).get(key) for key in expected} != expected:
        raise RunError(f"{cell.run_dir}: made on emulated hosts {hosts}, expected {expected}")
    difference = cell.disagreement(recorded)
    if difference:
        raise RunError(f"{cell.run_dir}: holds something else: {difference}")
