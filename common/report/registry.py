"""Tables and the runs that they are made of: results/definitions/tables/<name>.yaml."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, StrictInt, ValidationInfo, model_validator

from common.cli import nearest
from common.report.columns import DEFAULT_COLUMNS, EQUIVALENT, Column, Label, parse_column
from common.report.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.overrides import Override, meaning, parse_override
from common.report.published import Published, published_names, published_values
from common.report.quantities import QUANTITIES, Quantity
from common.report.tuning import SWEEPS, Sweep, TunedFile, read_tuned, sweep_command

TABLES = ROOT / "results" / "definitions" / "tables"

# Keys that do not change what a run computes, only where it computes, reads and writes, and what it prints.
BOOKKEEPING = re.compile(
    r"run_dir|resume|name|profile|peak_tflops|logging(\..*)?"
    r"|training\.(threads|device|checkpoint_every|checkpoints_kept)|data\.(folder|path|copy_to|workers)"
)


Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", description="lower case letters, digits and _")]


class Row(Definition):
    """A row: a method on a topology, and the overrides that select it."""

    name: Name
    method: str = Field(description="the label in the column 'method'")
    topology: str = Field(description="the label in the column 'topology'")
    labels: dict[Name, str] = Field({}, description="labels in the columns that the table defines")
    cluster: str | None = Field(None, description="a file of slurm/clusters instead of the table's")
    overrides: tuple[Override, ...] = ()
    centre: PositiveFloat | None = Field(None, description="the middle of the learning rates that are tried")
    tuned_with: Name | None = Field(None, description="the row whose tuned values this one takes, instead of a centre")

    @property
    def takes_tuned(self) -> bool:
        """Whether it takes values that the table's sweep chooses."""
        return self.centre is not None or self.tuned_with is not None

    def __hash__(self) -> int:
        return hash((self.name, self.overrides))  # labels are a dict

    def with_workers(self, count: int) -> "Row":
        """Return the same row with this number of workers."""
        overrides = (*self.overrides, f"workers.count={count}")
        tuned_with = self.tuned_with and f"{self.tuned_with}_{count}"
        return self.model_copy(
            update={"name": f"{self.name}_{count}", "overrides": overrides, "tuned_with": tuned_with}
        )

    @property
    def workers(self) -> int | None:
        """The number of workers, if the row sets it."""
        return meaning(self.overrides).get("workers.count")


def _parse_column(written: Any, info: ValidationInfo) -> Column | Label:
    """Return the column of a name, with the keys that are validated before `columns`."""
    if isinstance(written, Column | Label):
        return written  # of a file that has been validated
    if not isinstance(written, str):
        raise ValueError("expected a column's name")
    context = {key: info.data.get(key) for key in ("baseline", "proxy_of", "margins")}
    return parse_column(written, info.data.get("labels", {}), info.data.get("variants", {}), **context)


class TableFile(Definition):
    """The content of results/definitions/tables/<name>.yaml."""

    title: str = Field(description="a line of text")
    note: str = ""
    task: Literal["cnn", "transformer", "gpt2"]
    runs: Name = Field(description="the sub-folder of the runs folder")
    seeds: tuple[StrictInt, ...] = Field(min_length=1, description="a list of integers")
    cluster: str | None = Field(None, description="a file of slurm/clusters: what one of its runs is submitted to")
    over: str | None = Field(
        None, description="a number of the configuration against which the figure shows the rows (default: the steps)"
    )
    metric: str = Field("accuracy", description="the validation metric that figures and progress lines show")
    labels: dict[Name, str] = Field({}, description="columns of labels besides the usual ones, and their definitions")
    overrides: tuple[Override, ...] = Field((), description="overrides that all rows share")
    workers: tuple[PositiveInt, ...] = Field((), description="numbers of workers: each row is made with every one")
    variants: dict[Name, tuple[Override, ...]] = Field(
        {}, description="overrides by name: each row is made with every one, in columns <variant>_<column>"
    )
    published: tuple[str, ...] = Field((), description="files of results/paper whose rows have the same names")
    proxy_of: Name | None = Field(None, description="the table that this one is a small version of")
    baseline: Name | None = Field(
        None, description="the row that differences are taken from, for each number of workers"
    )
    equivalent: dict[Name, Name] = Field({}, description="rows that columns <quantity>_equivalent test: {row: other}")
    margins: dict[str, PositiveFloat] = Field({}, description="how far apart these may be, by quantity, in its unit")
    columns: tuple[Annotated[Column | Label, PlainValidator(_parse_column)], ...] = Field(
        DEFAULT_COLUMNS, validate_default=True, description="a list of columns' names"
    )
    sweep: Sweep | None = Field(None, description="how the learning rates of the rows are tuned")
    rows: tuple[Row, ...] = Field(min_length=1, description="a list of rows")

    @model_validator(mode="after")
    def _check(self) -> "TableFile":
        if self.metric not in QUANTITIES:
            raise ValueError(f"metric={self.metric!r}: {nearest(self.metric, QUANTITIES)}")
        for row in self.rows:
            if row.labels.keys() != self.labels.keys():
                raise ValueError(f"row {row.name!r}: expected labels {', '.join(self.labels) or '(none)'}")
        for name in self.published:
            if name not in published_names():
                raise ValueError(f"published={name!r}: {nearest(name, published_names())}")
        names = [row.name.removesuffix(f"_{row.workers}") for row in self.rows]
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline={self.baseline!r}: {nearest(self.baseline, names)}")
        self._check_equivalent(names)
        _expect_unique("seeds", self.seeds)
        _expect_unique("the rows' names", [row.name for row in self.rows])
        labels = [(row.method, row.topology, row.workers, *row.labels.values()) for row in self.rows]
        _expect_unique("method, topology, workers and labels of the rows", labels)
        for row in self.rows:
            for variant in self.variants.values() or [()]:
                keys = [parse_override(text)[0] for text in (*self.overrides, *variant, *row.overrides)]
                tuned = self.sweep.keys if self.sweep and row.takes_tuned else ()
                _expect_unique(f"the overrides of row {row.name!r}", [*keys, *tuned])
        self._check_sweep()
        return self

    def _check_sweep(self) -> None:
        with_centre = [row.name for row in self.rows if row.centre is not None]
        for row in self.rows:
            if self.sweep is None and (row.centre or row.tuned_with):
                raise ValueError(f"row {row.name!r}: centre and tuned_with: expected in a table with a sweep only")
            if self.sweep and sum(map(bool, (row.centre, row.tuned_with, self._has_own_values(row)))) != 1:
                keys = ", ".join(self.sweep.keys)
                raise ValueError(f"row {row.name!r}: expected either centre, tuned_with, or overrides of {keys}")
            if row.tuned_with and row.tuned_with not in with_centre:
                raise ValueError(
                    f"row {row.name!r}: tuned_with={row.tuned_with!r}: {nearest(row.tuned_with, with_centre)}"
                )
        if self.sweep and (both := sorted({*self.sweep.seeds} & {*self.seeds})):
            raise ValueError(f"sweep.seeds: expected none that the table reports, got {', '.join(map(str, both))}")

    def _has_own_values(self, row: Row) -> bool:
        """Return whether a row's own overrides have all that the sweep would choose."""
        return {*self.sweep.keys} <= {parse_override(text)[0] for text in row.overrides}

    def _check_equivalent(self, names: Sequence[str]) -> None:
        for row, other in self.equivalent.items():
            for name in (row, other):
                if name not in names:
                    raise ValueError(f"equivalent: {name!r}: {nearest(name, names)}")
            if row == other:
                raise ValueError(f"equivalent: {row!r}: expected another row to compare it with")
        tested = {column.quantity.name for column in self.numbers if column.statistic is EQUIVALENT}
        for quantity in self.margins:
            if quantity not in tested:
                raise ValueError(f"margins.{quantity}: expected a column {quantity}_equivalent")
        if bool(tested) != bool(self.equivalent):
            raise ValueError("equivalent: expected with columns <quantity>_equivalent, and only with them")

    @property
    def numbers(self) -> list[Column]:
        """The columns of numbers."""
        return [column for column in self.columns if isinstance(column, Column)]


class Table(TableFile):
    """A table: the name and content of its file, with a row for each number of workers.

    settled: the states of a run that need no more training
    tuned:   what the table's sweep chose; None if it has none, or if that has not been made
    """

    settled: ClassVar[tuple[str, ...]] = ("finished",)
    name: str
    tuned: TunedFile | None = None

    @classmethod
    def of(cls, name: str, file: TableFile, tuned: TunedFile | None = None) -> "Table":
        """Return the table of a file, with what its sweep chose."""
        rows = [row.with_workers(count) for row in file.rows for count in file.workers] or file.rows
        return cls(name=name, tuned=tuned, **dict(file) | {"workers": (), "rows": tuple(rows)})

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
        return "/".join(filter(None, [row.tuned_with or row.name, variant]))

    def tuned_overrides(self, row: Row, variant: str | None) -> tuple[str, ...]:
        """Return the overrides that the table's sweep chose for a row; none if it is not tuned or has its own."""
        if not row.takes_tuned or self.untuned:
            return ()
        return self.tuned.methods[self.method(row, variant)].best.overrides

    @property
    def untuned(self) -> str | None:
        """Why the rows lack their tuned values, and the command that makes them; None if they have or need none."""
        if self.sweep is None:
            return None
        command = sweep_command(self.name)
        if self.tuned is None:
            return f"{self.name} is not tuned yet: results/sweeps/{self.name}.yaml is missing; make it with: {command}"
        tuned, rows = self.tuned, [row for row in self.rows if row.centre is not None]
        wanted = {self.method(row, v): (row, v) for row in rows for v in self.variants or [None]}
        changed = [
            name
            for name, (row, variant) in wanted.items()
            if name not in tuned.methods
            or tuned.methods[name].centre != row.centre
            or meaning(tuned.methods[name].settings) != meaning(self.settings(row, variant))
        ]
        if tuned.sweep != self.sweep:
            changed.append("sweep")
        if not changed:
            return None
        where = f"results/sweeps/{self.name}.yaml"
        return f"{where} was made by another definition of {', '.join(changed)}; make it again with: {command}"

    @cached_property
    def published_values(self) -> Mapping[str, Mapping[str, Published]]:
        """{row: {quantity: number}} of the papers."""
        return published_values(self.published)

    def baseline_of(self, row: Row) -> str | None:
        """Return the name of the row that this one is compared with; None if there is none or it is this one."""
        name = self._with_workers_of(row, self.baseline)
        return None if name == row.name else name

    def equivalent_of(self, row: Row) -> str | None:
        """Return the name of the row that this one is tested to equal; None if there is none."""
        return self._with_workers_of(row, self.equivalent.get(row.name.removesuffix(f"_{row.workers}")))

    def _with_workers_of(self, row: Row, name: str | None) -> str | None:
        """Return the name of the row of this name, of the same number of workers if there are several."""
        alike = f"{name}_{row.workers}"
        return alike if alike in {other.name for other in self.rows} else name

    @property
    def setting(self) -> str | None:
        """The key against which the figure shows the rows, if they differ in one: `over`, or the number of workers."""
        return self.over or ("workers.count" if len({row.workers for row in self.rows}) > 1 else None)

    @property
    def quantities(self) -> set[Quantity]:
        """The quantities that the table needs of every run."""
        return {QUANTITIES[self.metric], *(column.quantity for column in self.numbers if column.statistic.of_runs)}


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
        return [*self.settings, f"run_dir={_quote(str(self.run_dir))}"]

    @property
    def command(self) -> str:
        """The shell command that makes this run."""
        return shlex.join(["python", "-m", f"{self.task}.train", *self.overrides])

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
        missing = object()
        more = [key for key in found if key not in self._expected and not BOOKKEEPING.fullmatch(key)]
        keys = [*self._expected, *more]
        differences = [
            f"{key}: {_show(found, key)} there, {_show(self._expected, key)} here"
            for key in keys
            if found.get(key, missing) != self._expected.get(key, missing)
        ]
        return "; ".join(differences) or None


def load_table(
    name: str, key: str = "table", folder: Path = TABLES, also: Sequence[str] = (), sweeps: Path = SWEEPS
) -> Table:
    """Read and validate a table's file, with what its sweep chose if there is that; the name 3 means table3.

    key:   what the user typed before the name, for messages
    also:  other names that would have been accepted

    Raises UsageError for an unknown name (with the nearest one), and for a wrong file (with key and expectation).
    """
    name = full_name(name, key)
    content = read_definition(folder, name, key, also)
    with explained(folder, name, TableFile):
        file = TableFile.model_validate(content)
        return Table.of(name, file, read_tuned(name, sweeps) if file.sweep else None)


def full_name(name: str, key: str) -> str:
    """Return a table's or figure's whole name: a number alone is that of the first paper, 3 -> table3."""
    return f"{key}{name}" if name.isdecimal() else name


def table_names(folder: Path = TABLES) -> list[str]:
    """Return the names of all tables of runs."""
    return names_in(folder)


def _show(settings: dict[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "not set"


def _quote(value: str) -> str:
    """Return a path as a value of Hydra's override grammar."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _expect_unique(what: str, values: Sequence[Any]) -> None:
    repeated = sorted({_words(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what}: expected each once, got {', '.join(repeated)} more than once")


def _words(value: Any) -> str:
    """Return a value as text; of a tuple, those that are not None."""
    return " ".join(str(part) for part in value if part is not None) if isinstance(value, tuple) else str(value)
