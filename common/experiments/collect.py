"""Gather a table's finished runs, and find what is missing."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from common.cli import UsageError
from common.experiments.quantities import Column
from common.experiments.runs import FinishedRun, RunError, has_run, read_overrides, read_run, read_scores
from common.experiments.tables import Cell, Table

logger = logging.getLogger(__name__)


class Missing(NamedTuple):
    """A cell without a usable run, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True)
class Collection:
    """A table's usable runs below the folders `roots`, and the cells without one.

    root:   the folder in which missing runs would be made
    frame:  a line for each run in the table's order: row, variant, seed, run (a FinishedRun) and the quantities that
            the table needs, None where a run may lack one
    """

    table: Table
    roots: tuple[Path, ...]
    root: Path
    frame: pd.DataFrame
    missing: Sequence[Missing]

    @property
    def all_runs(self) -> list[FinishedRun]:
        """Every usable run, in the table's order."""
        return self.frame["run"].tolist()

    def of(self, row: str, variant: str | None = None) -> list[FinishedRun]:
        """Return the usable runs of a row, of one variant or of all."""
        frame = _of_variant(self.frame, variant)
        return frame.loc[frame["row"] == row, "run"].tolist()

    def values(self, column: Column) -> dict[str, dict[tuple[str | None, int], float | None]]:
        """Return {row: {(variant, seed): the column's quantity}}, with {} for rows without runs."""
        found: dict[str, dict[tuple[str | None, int], float | None]] = {row.name: {} for row in self.table.rows}
        frame = _of_variant(self.frame, column.variant)
        lines = frame[["row", "variant", "seed", column.quantity.name]]
        for row, variant, seed, value in lines.itertuples(index=False, name=None):
            found[row][variant, seed] = value
        return found

    def of_variant(self, variant: str) -> "Collection":
        """Return the collection of a variant alone, named after it."""
        changes = {"name": f"{self.table.name}_{variant}", "title": f"{self.table.title}, {variant}", "variants": {}}
        missing = [m for m in self.missing if m.cell.variant == variant]
        table = self.table.model_copy(update=changes)
        return replace(self, table=table, frame=_of_variant(self.frame, variant), missing=missing)

    def of_rows(self, rows: Sequence[str], title: str) -> "Collection":
        """Return the collection of these rows alone, under another title."""
        kept = tuple(row for row in self.table.rows if row.name in rows)
        table = self.table.model_copy(update={"rows": kept, "title": title})
        missing = [m for m in self.missing if m.cell.row.name in rows]
        return replace(self, table=table, frame=self.frame[self.frame["row"].isin(rows)], missing=missing)


def _of_variant(frame: pd.DataFrame, variant: str | None) -> pd.DataFrame:
    """Return the lines of a variant, all if it is None."""
    return frame if variant is None else frame[frame["variant"] == variant]


def collect(table: Table, *roots: Path, allow_empty: bool = False, make_in: Path | None = None) -> Collection:
    """Read the run of every cell from the first of these folders that has a usable one.

    make_in: the folder in which missing runs would be made (default: the first)

    Runs that are unfinished, broken, without a number that the table needs, or made with overrides other than the
    table's are named in a warning and counted as missing. Raises UsageError if no usable run is left, or if the table
    is not tuned, unless allow_empty.
    """
    if table.untuned and not allow_empty:
        raise UsageError(table.untuned)
    root, lines, missing = make_in or roots[0], [], []
    for cell, *cells in zip(table.cells(root), *map(table.cells, roots), strict=True):
        line, reasons = (None, [table.untuned]) if table.untuned else _first_usable(table, cells)
        if line is None:
            missing.append(Missing(cell, "; ".join(reasons) or "not run yet"))
        else:
            lines.append({"row": cell.row.name, "variant": cell.variant, "seed": cell.seed} | line)
    if not lines and not allow_empty:
        where = " or ".join(str(root / table.runs) for root in roots)
        raise UsageError(
            f"runs={','.join(map(str, roots))}: no finished run in {where}; "
            f"make them with: {reproduce_command(table, root)}"
        )
    names = ["row", "variant", "seed", "run", *(quantity.name for quantity in table.quantities)]
    frame = pd.DataFrame(lines, columns=names, dtype=object)  # a numeric dtype would turn None into NaN (diverged)
    return Collection(_recorded(table, frame), roots, root, frame, missing)


def _recorded(table: Table, frame: pd.DataFrame) -> Table:
    """Return the table without the columns of optional quantities that none of these runs has."""

    def is_shown(column: Column) -> bool:
        if not column.of_runs or column.quantity.absent is None:
            return True
        return any(value is not None for value in _of_variant(frame, column.variant)[column.quantity.name])

    return table.model_copy(update={"columns": tuple(column for column in table.columns if is_shown(column))})


def _first_usable(table: Table, cells: Sequence[Cell]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the first run that can be read, with its quantities, and why earlier ones cannot, which is also logged."""
    reasons: list[str] = []
    for cell in cells:
        try:
            if has_run(cell.run_dir):
                return _measure(table, cell), reasons
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
    return _measure(table, cell)["run"]


def _measure(table: Table, cell: Cell) -> dict[str, Any]:
    """Return the run of a cell and its quantities by name; raises RunError as `read_cell` does."""
    run = replace(read_run(cell.run_dir), target=table.target)
    check_overrides(cell, run.environment)
    run.total("workers")
    return {"run": run} | {quantity.name: quantity.of(run) for quantity in table.quantities}


def check_overrides(cell: Cell, environment: Mapping[str, object]) -> None:
    """Raise RunError unless the run in the cell's folder recorded the cell's overrides."""
    difference = cell.disagreement(read_overrides(cell.run_dir, environment))
    if difference:
        raise RunError(f"{cell.run_dir}: holds something else: {difference}")
