"""The registry: results/definitions/tables/<name>.yaml says which runs a table is made of."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    StrictInt,
    model_validator,
)

from common.cli import nearest
from common.report.columns import DEFAULT_COLUMNS, QUANTITIES, check_column, quantities_of, split_variant
from common.report.definitions import ROOT, Definition, explained, names_in, read_definition
from common.report.published import Published, published_names, published_values

TABLES = ROOT / "results" / "definitions" / "tables"

# Keys that reproduce sets for each run when it is made.
OF_EACH_RUN = ("seed", "run_dir", "resume")
# Keys that say on what a run is made, where it reads and writes and what it prints, not what it computes.
BOOKKEEPING = re.compile(
    r"run_dir|resume|name|profile|peak_tflops|logging(\..*)?"
    r"|training\.(threads|device|checkpoint_every|checkpoints_kept)|data\.(folder|path|copy_to|workers)"
)


@cache  # the parser is slow, and the runs of a table share most of their overrides
def parse_override(text: str) -> tuple[str, Any]:
    """(key, value) of one Hydra override, so that 1e-3 equals 0.001; ValueError if it is none or a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ValueError(f"{text!r}: expected one Hydra override, key=value") from None
    if override.is_sweep_override():
        raise ValueError(f"{text!r}: expected one value, got a sweep over several")
    prefix = "~" if override.is_delete() else ""
    package = f"@{override.package}" if override.package else ""
    return f"{prefix}{override.key_or_group}{package}", override.value()


def _check_override(text: str) -> str:
    key, _ = parse_override(text)
    if key in OF_EACH_RUN:
        raise ValueError(f"{key} is set for each run when it is made; expected any other key")
    return text


Override = Annotated[str, AfterValidator(_check_override)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", description="lower case letters, digits and _")]


class Row(Definition):
    """One row: a method on a topology, and the overrides that make it."""

    name: Name
    method: str = Field(description="the label in the column 'method'")
    topology: str = Field(description="the label in the column 'topology'")
    labels: dict[Name, str] = Field({}, description="labels in columns of the table's own")
    cluster: str | None = Field(None, description="a file of slurm/clusters instead of the table's")
    overrides: tuple[Override, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.overrides))  # labels are a dict

    def with_workers(self, count: int) -> "Row":
        """The same row with so many workers."""
        overrides = (*self.overrides, f"workers.count={count}")
        return self.model_copy(update={"name": f"{self.name}_{count}", "overrides": overrides})

    @property
    def workers(self) -> int | None:
        """The number of workers, where the row sets it."""
        return dict(map(parse_override, self.overrides)).get("workers.count")


class TableFile(Definition):
    """The content of results/definitions/tables/<name>.yaml."""

    title: str = Field(description="a line of text")
    note: str = ""
    task: Literal["cnn", "transformer", "gpt2"]
    runs: Name = Field(description="the sub-folder of the runs folder")
    seeds: tuple[StrictInt, ...] = Field(min_length=1, description="a list of integers")
    cluster: str | None = Field(None, description="a file of slurm/clusters: what one of its runs is submitted to")
    metric: str = Field("accuracy", description="the validation metric that figures and progress lines show")
    labels: dict[Name, str] = Field({}, description="columns of labels besides the usual ones, and their definitions")
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    overrides: tuple[Override, ...] = Field((), description="overrides that all rows share")
    workers: tuple[PositiveInt, ...] = Field((), description="numbers of workers: each row is made with every one")
    variants: dict[Name, tuple[Override, ...]] = Field(
        {}, description="overrides by name: each row is made with every one, in columns <variant>_<column>"
    )
    published: tuple[str, ...] = Field((), description="files of results/paper whose rows have the same names")
    proxy_of: Name | None = Field(None, description="the table that this one is a small version of")
    baseline: Name | None = Field(None, description="the row that p-values compare with, for each number of workers")
    rows: tuple[Row, ...] = Field(min_length=1, description="a list of rows")

    @model_validator(mode="after")
    def _check(self) -> "TableFile":
        if self.metric not in QUANTITIES:
            raise ValueError(f"metric={self.metric!r}: {nearest(self.metric, QUANTITIES)}")
        for row in self.rows:
            if row.labels.keys() != self.labels.keys():
                raise ValueError(f"row {row.name!r}: expected labels {', '.join(self.labels) or '(none)'}")
        for column in self.numbers:
            try:
                check_column(split_variant(column, self.variants)[1])
            except ValueError as error:
                raise ValueError(f"columns: {column!r}: {error}") from None
        for name in self.published:
            if name not in published_names():
                raise ValueError(f"published={name!r}: {nearest(name, published_names())}")
        names = [row.name.removesuffix(f"_{row.workers}") for row in self.rows]
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline={self.baseline!r}: {nearest(self.baseline, names)}")
        if self.baseline is None and any(column.endswith("_p_value") for column in self.columns):
            raise ValueError("baseline: missing; columns with p-values need a row to compare with")
        _expect_unique("seeds", self.seeds)
        _expect_unique("the rows' names", [row.name for row in self.rows])
        labels = [(row.method, row.topology, row.workers) for row in self.rows]
        _expect_unique("method, topology and workers of the rows", labels)
        for row in self.rows:
            for variant in self.variants.values() or [()]:
                keys = [parse_override(text)[0] for text in (*self.overrides, *variant, *row.overrides)]
                _expect_unique(f"the overrides of row {row.name!r}", keys)
        return self

    @property
    def numbers(self) -> list[str]:
        """The columns that are no labels of the table's own."""
        return [column for column in self.columns if column not in self.labels]


class Table(TableFile):
    """A table: its file's name and content, with a row for each number of workers."""

    name: str

    @classmethod
    def of(cls, name: str, file: TableFile) -> "Table":
        """The table of a file."""
        rows = [row.with_workers(count) for row in file.rows for count in file.workers] or file.rows
        return cls(name=name, **dict(file) | {"workers": (), "rows": tuple(rows)})

    def cells(self, runs: Path) -> Iterator["Cell"]:
        """Every run of the table, row by row and seed by seed, in <runs>/<table>/<row>[/<variant>]/seed_<k>."""
        for row in self.rows:
            for variant in self.variants or [None]:
                for seed in self.seeds:
                    yield self.cell(row, seed, runs, variant)

    def cell(self, row: Row, seed: int | str, runs: Path, variant: str | None = None) -> "Cell":
        """The run of one row and seed (a text such as K stands for any seed in commands that are shown)."""
        more = () if variant is None else self.variants[variant]
        settings = (*self.overrides, *more, *row.overrides, f"seed={seed}")
        folder = runs / self.runs / row.name / (variant or "")
        return Cell(self.task, row, seed, settings, folder / f"seed_{seed}", variant)

    @cached_property
    def published_values(self) -> Mapping[str, Mapping[str, Published]]:
        """{row: {quantity: number}} of the papers."""
        return published_values(self.published)

    def baseline_of(self, row: Row) -> str | None:
        """The name of the row that this one is compared with; None if there is none or it is this one."""
        if self.baseline is None:
            return None
        alike = [other.name for other in self.rows if other.name == f"{self.baseline}_{row.workers}"]
        name = alike[0] if alike else self.baseline
        return None if name == row.name else name

    @property
    def quantities(self) -> set[str]:
        """Names of the quantities that the table needs of every run."""
        return {self.metric, *quantities_of([split_variant(column, self.variants)[1] for column in self.numbers])}


@dataclass(frozen=True)
class Cell:
    """One run of a table: what is trained, and the folder that holds it."""

    task: str
    row: Row
    seed: int | str
    settings: tuple[str, ...]
    run_dir: Path
    variant: str | None = None

    @property
    def label(self) -> str:
        """Row and seed in words."""
        return " ".join([self.row.name, *([self.variant] if self.variant else []), f"seed {self.seed}"])

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides of the run, its folder included."""
        return [*self.settings, f"run_dir={_quote(str(self.run_dir))}"]

    @property
    def command(self) -> str:
        """The shell command that makes this run."""
        return shlex.join(["python", "-m", f"{self.task}.train", *self.overrides])

    @property
    def experiment(self) -> str | None:
        """The override that names the recipe."""
        return next((text for text in self.settings if text.startswith("experiment=")), None)

    @cached_property
    def _expected(self) -> dict[str, Any]:
        return _meaning(self.settings)

    def disagreement(self, recorded: Sequence[str]) -> str | None:
        """How the overrides recorded by a run differ from this cell's; None if they mean the same.

        Bookkeeping counts only where the cell sets it.
        """
        try:
            found = _meaning(recorded)
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


def load_table(name: str, key: str = "table", folder: Path = TABLES, also: Sequence[str] = ()) -> Table:
    """Reads and validates a table's file.

    `key` is what the user typed the name for; table=3 means table3. `also`: other names that would do. Raises
    UsageError: unknown name (with the nearest one), or what is wrong in the file (file, key, value and expectation).
    """
    name = full_name(name, key)
    content = read_definition(folder, name, key, also)
    with explained(folder, name, TableFile):
        return Table.of(name, TableFile.model_validate(content))


def full_name(name: str, key: str) -> str:
    """A number alone is that table or figure of the first paper: 3 -> table3."""
    return f"{key}{name}" if name.isdecimal() else name


def table_names(folder: Path = TABLES) -> list[str]:
    """The tables that can be asked for."""
    return names_in(folder)


def _meaning(overrides: Sequence[str]) -> dict[str, Any]:
    return dict(map(parse_override, overrides))


def _show(settings: dict[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "not set"


def _quote(value: str) -> str:
    """A path as a value of Hydra's override grammar."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _expect_unique(what: str, values: Sequence[Any]) -> None:
    repeated = sorted({_words(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what}: expected each once, got {', '.join(repeated)} more than once")


def _words(value: Any) -> str:
    """A value, or a tuple of them without what is not there, in words."""
    return " ".join(str(part) for part in value if part is not None) if isinstance(value, tuple) else str(value)
