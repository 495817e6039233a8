"""Tables and the runs that they are made of."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from common.arguments import differences
from common.cli import UsageError
from common.config.base import is_bookkeeping
from common.config.overrides import quoted
from common.experiments.definitions import explained, load_definition, meaning
from common.experiments.quantities import QUANTITIES, Quantity
from common.experiments.sweeps import SWEEPS, TunedFile, read_tuned, sweep_command
from common.experiments.table_file import TABLES, Row, TableFile


class Table(TableFile):
    """A table: the name and content of its file, with a row for each number of workers.

    settled: the states of a run that need no more training
    runs:    the sub-folder of the runs folder
    tuned:   what the table's sweep chose; None if it has no sweep, or if the sweep has not been made
    source:  the table of `tuned_by`
    """

    settled: ClassVar[tuple[str, ...]] = ("finished",)
    name: str
    runs: str
    tuned: TunedFile | None = None
    source: "Table | None" = None

    @classmethod
    def of(cls, name: str, file: TableFile, tuned: TunedFile | None = None, source: "Table | None" = None) -> "Table":
        """Return the table of a file, with what its sweep chose."""
        rows = tuple(row.with_workers(count) for row in file.rows for count in file.workers) or file.rows
        return cls(name=name, runs=name, tuned=tuned, source=source, **dict(file) | {"workers": (), "rows": rows})

    def cells(self, runs: Path) -> Iterator["Cell"]:
        """Yield every run of the table, row by row and seed by seed, in <runs>/<table>/<row>[/<variant>]/seed_<k>."""
        for row in self.rows:
            for variant in self.variants or [None]:
                for seed in self.seeds:
                    yield self.cell(row, seed, runs, variant)

    def cell(self, row: Row, seed: int | str, runs: Path, variant: str | None = None) -> "Cell":
        """Return the run of a row and seed; the seed may be a text such as K in commands that stand for all seeds."""
        settings = (*self.settings(row, variant), *self.tuned_overrides(row, variant), f"seed={seed}")
        folder = runs / self.runs / row.name / (variant or "")
        return Cell(self.task, row, seed, settings, folder / f"seed_{seed}", variant)

    def settings(self, row: Row, variant: str | None) -> tuple[str, ...]:
        """Return the overrides that the table states for all runs of a row, without tuned values."""
        more = () if variant is None else self.variants[variant]
        return (*self.overrides, *more, *row.overrides)

    def method(self, row: Row, variant: str | None) -> str:
        """Return the name under which a sweep keeps the values that a row takes: ROW or ROW/VARIANT."""
        return "/".join(filter(None, [row.tuned_with or row.name, None if self.tuned_by else variant]))

    def tuned_overrides(self, row: Row, variant: str | None) -> tuple[str, ...]:
        """Return the overrides that the table's sweep chose for a row; () if it is not tuned or has its own values."""
        if not row.takes_tuned or self.untuned:
            return ()
        return self.tuned.methods[self.method(row, variant)].best.overrides

    @property
    def untuned(self) -> str | None:
        """Why the rows lack their tuned values, and the command that makes them; None if they have or need none."""
        if self.source is not None and (reason := self.source.untuned):
            return reason
        file, again = f"results/sweeps/{self.tuned_by or self.name}.yaml", f"with: {sweep_command(self.name)}"
        if self.source is not None:
            missing = {row.tuned_with for row in self.rows} - {None, *self.tuned.methods}
            return f"{file}: has no {', '.join(sorted(missing))}" if missing else None
        if self.sweep is None:
            return None
        if self.tuned is None:
            return f"{self.name} is not tuned yet: {file} is missing; make it {again}"
        methods = self.tuned.methods
        wanted = {self.method(row, v): (row, v) for row in self.tuned_rows for v in self.variants or [None]}
        changed = [
            name
            for name, (row, variant) in wanted.items()
            if name not in methods
            or methods[name].centre != row.centre
            or meaning(methods[name].settings) != meaning(self.settings(row, variant))
        ]
        if self.tuned.sweep != self.sweep:
            changed.append("sweep")
        if not changed:
            return None
        return f"{file} was made by another definition of {', '.join(changed)}; make it again {again}"

    def baseline_of(self, row: Row) -> str | None:
        """Return the name of the row that this one is compared with; None if there is none or it is this one."""
        name = self._with_workers_of(row, self.baseline)
        return None if name == row.name else name

    def equivalent_of(self, row: Row) -> str | None:
        """Return the name of the row that this one is tested to equal; None if there is none."""
        return self._with_workers_of(row, self.equivalent.get(row.name.removesuffix(f"_{row.workers}")))

    def _with_workers_of(self, row: Row, name: str | None) -> str | None:
        """Return the name of the row called `name`, with as many workers if there are several; None without one."""
        names = {other.name for other in self.rows}
        return next((found for found in (f"{name}_{row.workers}", name) if found in names), None)

    @property
    def setting(self) -> str | None:
        """The key that the figure shows the rows against, if any: `over`, or the number of workers if it differs."""
        return self.over or ("workers.count" if len({row.workers for row in self.rows}) > 1 else None)

    @property
    def quantities(self) -> list[Quantity]:
        """The quantities that the table needs of every run, the metric first."""
        columns = (column.quantity for column in self.numbers if column.of_runs)
        return [*dict.fromkeys([QUANTITIES[self.metric], *columns])]


@dataclass(frozen=True)
class Cell:
    """One run of a table: its settings and its folder."""

    task: str
    row: Row
    seed: int | str
    settings: tuple[str, ...]
    run_dir: Path
    variant: str | None = None

    @property
    def label(self) -> str:
        """Row, variant and seed as text."""
        return " ".join([self.row.name, *([self.variant] if self.variant else []), f"seed {self.seed}"])

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides of the run, its folder included."""
        folder = str(self.run_dir)
        plain = re.fullmatch(r"[A-Za-z0-9_./-]+", folder)
        return [*self.settings, f"run_dir={folder if plain else quoted(folder)}"]

    @property
    def command(self) -> str:
        """The shell command that makes this run where there is none."""
        return shlex.join(["python", *self.arguments()])

    @property
    def command_here(self) -> str:
        """The shell command that makes this run, or continues it."""
        return shlex.join(["python", *self.arguments(*self.resume)])

    @property
    def resume(self) -> list[str]:
        """The override that continues the run in this folder; none if there is no run."""
        return ["resume=true"] if self.run_dir.is_dir() and any(self.run_dir.iterdir()) else []

    def arguments(self, *more: str) -> list[str]:
        """Return Python's arguments that make this run, with more overrides."""
        return ["-m", f"{self.task}.train", *self.overrides, *more]

    @cached_property
    def _expected(self) -> dict[str, Any]:
        return meaning(self.settings)

    def disagreement(self, recorded: Sequence[str]) -> str | None:
        """Return how the overrides that a run recorded differ from this cell's; None if they mean the same.

        Keys that do not change what a run computes count only if the cell sets them.
        """
        try:
            found = meaning(recorded)
        except ValueError as error:
            return f"it records {error}"
        more = [key for key in found if key not in self._expected and not is_bookkeeping(key)]
        return "; ".join(differences(found, self._expected, [*self._expected, *more], "not set", "here")) or None


def load_table(
    name: str, key: str = "table", folder: Path = TABLES, also: Sequence[str] = (), sweeps: Path = SWEEPS
) -> Table:
    """Read and validate a table's file, with what its sweep chose, if anything; the name 3 means table3.

    key:   what the user typed before the name, for messages
    also:  other names that would have been accepted

    Raises UsageError for an unknown name (with the nearest one), and for a wrong file (with key and expectation).
    """
    name = full_name(name, key)
    file = load_definition(folder, name, TableFile, key, also)
    if key == "tuned_by" and file.sweep is None:
        raise UsageError(f"tuned_by={name}: expected a table with a sweep")
    source = load_table(file.tuned_by, "tuned_by", sweeps=sweeps) if file.tuned_by else None
    tuned = source.tuned if source else read_tuned(name, sweeps) if file.sweep else None
    with explained(folder, name, TableFile):  # rows for several numbers of workers are checked, too
        return Table.of(name, file, tuned, source)


def full_name(name: str, key: str) -> str:
    """Return a table's or figure's whole name: a number alone is from the first paper, 3 -> table3."""
    return f"{key}{name}" if name.isdecimal() else name
