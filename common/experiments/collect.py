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


class LackingError(RunError):
    """A finished run without a number that the table needs."""


class Missing(NamedTuple):
    """A cell without a usable run, and why; `lacking`: its folder has a finished one without a number."""

    cell: Cell
    reason: str
    lacking: bool = False


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

    def values(self, column: Column) -> dict[str, dict[int, float | None]]:
        """Return {row: {seed: the column's quantity}}, {} without runs; means over all variants if it is of none."""
        found: dict[str, dict[int, float | None]] = {row.name: {} for row in self.table.rows}
        count = 1 if column.variant else len(self.table.variants) or 1
        lines = _of_variant(self.frame, column.variant).groupby(["row", "seed"], sort=False)[column.quantity.name]
        for (row, seed), values in lines:
            if len(values) == count:  # a mean over other variants cannot be compared
                found[row][seed] = None if None in [*values] else sum(values) / count
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
    untuned, root, lines, missing = table.untuned, make_in or roots[0], [], []
    if untuned and not allow_empty:
        raise UsageError(untuned)
    for cell, *cells in zip(table.cells(root), *map(table.cells, roots), strict=True):
        line, errors = (None, {}) if untuned else _first_usable(table, cells)
        if line is None:
            reason = "; ".join(str(error).removeprefix(f"{folder}: ") for folder, error in errors.items())
            lacking = isinstance(errors.get(cell.run_dir), LackingError)
            missing.append(Missing(cell, untuned or reason or "not run yet", lacking))
        else:
            lines.append({"row": cell.row.name, "variant": cell.variant, "seed": cell.seed} | line)
    if not lines and not allow_empty:
        where = " or ".join(str(root / table.runs) for root in roots)
        make = f"make them with: {reproduce_command(table, root)}"
        how = next((each.reason for each in missing if each.lacking), make)
        raise UsageError(f"runs={','.join(map(str, roots))}: no finished run in {where}; {how}")
    names = ["row", "variant", "seed", "run", *(quantity.name for quantity in table.quantities)]
    frame = pd.DataFrame(lines, columns=names, dtype=object)  # a numeric dtype would turn None into NaN (diverged)
    return Collection(_recorded(table, frame), roots, root, frame, missing)


def _recorded(table: Table, frame: pd.DataFrame) -> Table:
    """Return the table without the columns of optional quantities that none of these runs has."""
    optional = {c: c.quantity.name for c in table.numbers if c.of_runs and c.quantity.absent is not None}
    absent = [c for c, name in optional.items() if not {*_of_variant(frame, c.variant)[name]} - {None}]
    return table.model_copy(update={"columns": tuple(column for column in table.columns if column not in absent)})


def _first_usable(table: Table, cells: Sequence[Cell]) -> tuple[dict[str, Any] | None, dict[Path, RunError]]:
    """Return the first run that can be read, with its quantities, and why earlier ones cannot, which is also logged."""
    errors: dict[Path, RunError] = {}
    for cell in cells:
        try:
            if has_run(cell.run_dir):
                return _measure(table, cell), errors
        except RunError as error:
            logger.warning("skipped %s", error)
            errors[cell.run_dir] = error
    return None, errors


def reproduce_command(table: Table, root: Path) -> str:
    """Return the shell command that makes all missing runs."""
    runs = [] if root == Path("runs") else [f"runs={root}"]
    return shlex.join(["python", "-m", "scripts.reproduce", f"table={table.runs}", *runs])


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
    """Return the finished run of a cell; raises RunError if there is none, LackingError if a number is missing."""
    return _measure(table, cell)["run"]


def _measure(table: Table, cell: Cell) -> dict[str, Any]:
    """Return the run of a cell and its quantities by name; raises RunError as `read_cell` does."""
    run = replace(read_run(cell.run_dir), target=table.target)
    check_overrides(cell, run.environment)
    run.total("workers")
    run.setting("workers.kind")
    try:
        return {"run": run} | {quantity.name: quantity.of(run) for quantity in table.quantities}
    except RunError as error:
        advice = "drop the table's columns that need it, or remove the run's folder to train it again"
        raise LackingError(f"{error}; {advice}") from None


def check_overrides(cell: Cell, environment: Mapping[str, object]) -> None:
    """Raise RunError unless the run in the cell's folder recorded the cell's overrides."""
    difference = cell.disagreement(read_overrides(cell.run_dir, environment))
    if difference:
        raise RunError(f"{cell.run_dir}: holds something else: {difference}")
