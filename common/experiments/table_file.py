"""Table files: results/definitions/tables/<name>.yaml."""

import os
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, ValidationInfo, model_validator

from common.cli import nearest
from common.experiments.definitions import (
    ROOT,
    Definition,
    Override,
    StrictSeed,
    meaning,
    names_in,
    parse_override,
    read_definition,
)
from common.experiments.quantities import QUANTITIES, Column, parse_column
from common.experiments.runs import Target
from common.experiments.sweeps import RATE, Sweep

PAPER = ROOT / "results" / "paper"
TABLES = ROOT / "results" / "definitions" / "tables"
CLUSTERS = ROOT / "slurm" / "clusters"
MOST_SHOWN = 7  # columns of a page
DEFAULT_COLUMNS = (
    *("method", "topology", "workers", "seeds", "local_over_noise_mean", "global_over_noise_mean", "accuracy_mean"),
    *("accuracy_2sigma", "train_loss_mean", "consensus_distance_mean", "bytes_per_step", "time_step_ms"),
)

Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", description="lowercase letters, digits and _")]


class Row(Definition):
    """A row: a method on a topology, and the overrides that select it."""

    name: Name
    method: str = Field(description="the label in the column 'method'")
    topology: str = Field(description="the label in the column 'topology'")
    labels: dict[Name, str] = Field({}, description="labels in the columns that the table defines")
    cluster: str | None = Field(None, description="a file in slurm/clusters, instead of the table's")
    overrides: tuple[Override, ...] = ()
    centre: PositiveFloat | None = Field(None, description="the centre of the grid of learning rates")
    tuned_with: Name | None = Field(None, description="the row whose tuned rate this one takes, instead of a centre")

    @property
    def takes_tuned(self) -> bool:
        """Whether it takes a rate that the table's sweep chooses."""
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


def _parse_column(written: Any, info: ValidationInfo) -> Column:
    """Return the column of this name, given the keys that are validated before `columns`."""
    if isinstance(written, Column):
        return written  # of a file that has been validated
    if not isinstance(written, str):
        raise ValueError("expected a column's name")
    known = info.data
    prefixes = [*known.get("variants", {}), *known.get("hardware", {})]
    return parse_column(written, known.get("labels", {}), prefixes, known.get("baseline"), known.get("margins"))


class TableFile(Definition):
    """The content of results/definitions/tables/<name>.yaml."""

    base: Name | None = Field(None, description="a table that supplies the keys missing here; rows are merged by name")
    title: str = Field(description="a line of text")
    note: str = Field("", description="what is compared, and how")
    findings: str = Field("", description="Markdown: what the kept runs show, for the page in results/tables")
    task: Literal["cnn", "transformer", "gpt2"]
    seeds: tuple[StrictSeed, ...] = Field(min_length=1, description="a list of integers")
    cluster: str | None = Field(None, description="a file in slurm/clusters: where one of its runs is submitted")
    over: str | None = Field(
        None, description="the numeric configuration key on the x axis of the figure (default: the steps)"
    )
    metric: str = Field("accuracy", description="the validation metric that figures and progress lines show")
    labels: dict[Name, str] = Field({}, description="additional label columns and their definitions")
    overrides: tuple[Override, ...] = Field((), description="overrides that all rows share")
    workers: tuple[PositiveInt, ...] = Field((), description="numbers of workers: each row is trained with every one")
    variants: dict[Name, tuple[Override, ...]] = Field(
        {}, description="overrides by name: each row is trained with every one, in columns <variant>_<column>"
    )
    target: Target | None = Field(None, description="a validation metric and the value to reach, for <...>_to_target")
    published: tuple[str, ...] = Field((), description="files of results/paper whose rows have the same names")
    hardware: dict[Name, str] = Field(
        {}, description="the paper's clusters by name, if it has several: columns <name>_<quantity>_published"
    )
    proxy_of: Name | None = Field(None, description="the table that this one is a small version of")
    baseline: Name | None = Field(None, description="the row that others are compared with, for each number of workers")
    equivalent: dict[Name, Name] = Field({}, description="rows compared in columns <quantity>_equivalent: {row: other}")
    margins: dict[str, PositiveFloat] = Field({}, description="largest difference that counts as equal, by quantity")
    columns: tuple[Annotated[Column, PlainValidator(_parse_column)], ...] = Field(
        DEFAULT_COLUMNS, validate_default=True, description="a list of column names"
    )
    shown: tuple[str, ...] = Field((), max_length=MOST_SHOWN, description="the columns that pages show")
    sweep: Sweep | None = Field(None, description="how the learning rates of the rows are tuned")
    tuned_by: Name | None = Field(None, description="the table whose sweep chose the values of rows with tuned_with")
    rows: tuple[Row, ...] = Field(min_length=1, description="a list of rows")

    @model_validator(mode="before")
    @classmethod
    def _with_base(cls, content: Any) -> Any:
        """Add keys that only the base states; a row takes missing keys from the base's row of the same name."""
        if not isinstance(content, dict) or content.get("base") is None:
            return content
        base = read_definition(TABLES, content["base"], key="base")
        if not isinstance(base, dict) or base.get("base") is not None:
            raise ValueError(f"base={content['base']}: expected a table that has no base itself")
        ours, theirs = (of.get("rows") or [] for of in (content, base))
        if not all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in (ours, theirs)):
            raise ValueError("rows: expected a list of rows, each with keys such as name and method")
        own = {str(row.get("name")): row for row in ours}
        rows = [row | own.pop(str(row.get("name")), {}) for row in theirs]
        return base | content | {"base": None, "rows": [*rows, *own.values()]}

    @model_validator(mode="after")
    def _check(self) -> "TableFile":
        names = [row.name.removesuffix(f"_{row.workers}") for row in self.rows]
        stated = [row.overrides for row in self.rows] + [*self.variants.values()]
        stated += [("workers.count=1",)] * bool(self.workers)
        _expect_known("metric", [self.metric], QUANTITIES)
        _expect_known("published", self.published, names_in(PAPER))
        _expect_known("shown", self.shown, [column.name for column in self.columns])
        _expect_unique("columns", [column.name for column in self.columns])
        _expect_unique("shown", self.shown)
        _expect_known("baseline", [self.baseline], names)
        _expect_known("proxy_of", [self.proxy_of], names_in(TABLES))
        _expect_known("over", [self.over], {key for overrides in stated for key in meaning(overrides)})
        _expect_known("cluster", [self.cluster, *(row.cluster for row in self.rows)], sorted(os.listdir(CLUSTERS)))
        for column in self.numbers:
            if column.variant in self.hardware and column.of_runs:
                raise ValueError(f"columns: {column.name}: expected published numbers only, of {column.variant}")
        self._check_rows()
        self._check_equivalent(names)
        self._check_sweep()
        return self

    def _check_rows(self) -> None:
        _expect_unique("seeds", self.seeds)
        _expect_unique("the rows' names", [row.name for row in self.rows])
        for row in self.rows:
            if row.labels.keys() != self.labels.keys():
                raise ValueError(f"row {row.name!r}: expected labels {', '.join(self.labels) or '(none)'}")
            for variant in self.variants.values() or [()]:
                keys = [parse_override(text)[0] for text in (*self.overrides, *variant, *row.overrides)]
                tuned = [RATE] if self.sweep and row.takes_tuned else []
                _expect_unique(f"the overrides of row {row.name!r}", keys + tuned)
        labels = [(row.method, row.topology, row.workers, *row.labels.values()) for row in self.rows]
        _expect_unique("method, topology, workers and labels of the rows", labels)

    def _check_equivalent(self, names: Sequence[str]) -> None:
        _expect_known("equivalent", [*self.equivalent, *self.equivalent.values()], names)
        for row, other in self.equivalent.items():
            if row == other:
                raise ValueError(f"equivalent: {row!r}: expected another row to compare it with")
        tested = {column.quantity.name for column in self.numbers if column.statistic == "equivalent"}
        for quantity in self.margins:
            if quantity not in tested:
                raise ValueError(f"margins.{quantity}: expected a column {quantity}_equivalent")
        if bool(tested) != bool(self.equivalent):
            raise ValueError("equivalent: expected with columns <quantity>_equivalent, and only with them")

    def _check_sweep(self) -> None:
        if self.tuned_by is not None:
            if self.sweep or self.tuned_rows:
                raise ValueError(
                    f"tuned_by={self.tuned_by}: expected neither a sweep nor centres: values come from there"
                )
            return
        for row in self.rows:
            if self.sweep is None and row.takes_tuned:
                raise ValueError(f"row {row.name!r}: centre and tuned_with: expected in a table with a sweep only")
            if row.tuned_with and self.sweep:
                known = [other.name for other in self.tuned_rows]
                _expect_known(f"row {row.name!r}: tuned_with", [row.tuned_with], known)
        if self.sweep is None:
            return
        for row in self.rows:
            has_own_rate = RATE in meaning(row.overrides)
            if sum(map(bool, (row.centre, row.tuned_with, has_own_rate))) != 1:
                raise ValueError(f"row {row.name!r}: expected either centre, tuned_with, or overrides of {RATE}")
        if both := sorted({*self.sweep.seeds} & {*self.seeds}):
            raise ValueError(f"sweep.seeds: expected none that the table reports, got {', '.join(map(str, both))}")
        reported = {self.metric, *(column.quantity.name for column in self.numbers)}
        decisive = [*self.margins] if self.sweep.fit and self.margins else sorted(reported)
        if self.sweep.quantity not in decisive:
            expected = ", ".join(decisive)
            raise ValueError(f"sweep.quantity={self.sweep.quantity}: expected what the table reports, {expected}")

    @property
    def tuned_rows(self) -> list[Row]:
        """The rows whose rates a sweep chooses."""
        return [row for row in self.rows if row.centre is not None]

    @property
    def numbers(self) -> list[Column]:
        """The columns of numbers."""
        return [column for column in self.columns if column.quantity]


def _expect_known(key: str, names: Sequence[str | None], known: Collection[str]) -> None:
    for name in names:
        if name is not None and name not in known:
            raise ValueError(f"{key}={name!r}: {nearest(name, known)}")


def _expect_unique(what: str, values: Sequence[Any]) -> None:
    def words(value: Any) -> str:  # the parts of a tuple that are not None
        return " ".join(str(part) for part in value if part is not None) if isinstance(value, tuple) else str(value)

    repeated = sorted({words(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what}: expected each once, got {', '.join(repeated)} more than once")
