"""A table of runs with the published numbers beside them, definitions, origin and missing runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from common.report.collect import Collection, reproduce_command, score_arguments
from common.report.columns import Column, Label, RowData, Value
from common.report.comparisons import Equivalence, corrected
from common.report.formats import exact_frame, format_table, latex, write_files
from common.report.origin import describe_origin
from common.report.published import load_published
from common.report.registry import Table
from common.report.table_file import Row
from common.report.tuning import sweep_command


def build_table(collection: Collection) -> pd.DataFrame:
    """Return a frame with the table's rows and columns: labels, numbers, comparisons; None where there is nothing.

    Rows without a finished run stay, with seeds = 0.
    """
    table = collection.table
    rows = _correct([_build_row(collection, row) for row in table.rows])
    # Plain objects: pandas would turn None (no number) into NaN (a run that diverged).
    return pd.DataFrame(rows, columns=[column.name for column in table.columns], dtype=object)


def write_table(collection: Collection, folder: Path, command: str) -> list[Path]:
    """Write <folder>/<table>.csv, .md and .tex and return their paths; `command` is what the user typed."""
    table, frame = collection.table, build_table(collection)
    tex = latex(format_table(frame, "latex_booktabs", table), table.title, f"Made by {command}")
    return write_files(folder / table.name, exact_frame(frame, table), _render(collection, frame, command), tex)


def missing_lines(collection: Collection) -> list[str]:
    """Return a line for each missing run and each run without scores of the test set: which, why, and the command."""
    return [f"{what}: {why}: {command}" for what, why, command in _missing(collection)]


def missing_summary(collection: Collection) -> list[str]:
    """Return the lines of `missing_lines`, but a single one for all that is missing for the same reason."""
    by_reason: dict[str, list[tuple[str, str, str]]] = {}
    for each in _missing(collection):
        by_reason.setdefault(each[1], []).append(each)
    table = collection.table
    of_all = sweep_command(table.name) if table.untuned else reproduce_command(table, collection.root)
    return [
        f"{len(these)} runs, the first is {these[0][0]}: {why}: {of_all}" if len(these) > 1 else ": ".join(these[0])
        for why, these in by_reason.items()
    ]


def _missing(collection: Collection) -> list[tuple[str, str, str]]:
    """Return triples: what is missing, why, and the shell command that makes it."""
    table = collection.table
    tuning = sweep_command(table.name) if table.untuned else None
    runs = [(m.cell.label, m.reason, tuning or m.cell.command) for m in collection.missing]
    scores = [(str(run.folder), score_arguments(table, run.folder)) for run in collection.all_runs]
    return runs + [(run, "no scores of the test set", shlex.join(["python", *call])) for run, call in scores if call]


def definitions(table: Table) -> list[str]:
    """Return a line for each column: its name and definition."""
    return [f"`{column.name}`: {column.definition}" for column in table.columns]


def published_lines(names: Sequence[str]) -> list[str]:
    """Return lines on the sources of published numbers, and on unknown ones and the reasons."""
    lines = []
    for name in names:
        published = load_published(name)
        lines.append(
            f"{published.title}. {published.citation}. Read from: {published.source}. "
            f"Hardware: {published.hardware}. Runs: {published.runs}. Data: results/paper/{name}.yaml"
        )
        reasons: dict[str, list[str]] = {}
        for row in published.rows:
            for quantity, number in row.values.items():
                if number.value is None:
                    reasons.setdefault(number.reason, []).append(f"{row.name} {quantity}")
        lines += [f"Unknown: {', '.join(cells)}: {reason}" for reason, cells in reasons.items()]
    return lines


def _build_row(collection: Collection, row: Row) -> dict[str, object]:
    table, runs = collection.table, collection.of(row.name)
    workers = sorted({int(run.total("workers")) for run in runs})
    labels = {
        "method": row.method,
        "topology": row.topology,
        "workers": workers[0] if len(workers) == 1 else "/".join(map(str, workers)) or row.workers,
        "seeds": _seeds([len(collection.of(row.name, variant)) for variant in table.variants or [None]]),
        **row.labels,
    }
    return {
        column.name: labels[column.name] if isinstance(column, Label) else _number(collection, row, column)
        for column in table.columns
    }


def _seeds(counts: Sequence[int]) -> int | str:
    """Return the number of seeds; that of each variant (3/0) where they differ."""
    return counts[0] if len(set(counts)) == 1 else "/".join(map(str, counts))


def _correct(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return rows with the equivalence tests of all columns corrected together."""
    cells = {
        (i, name): value
        for i, row in enumerate(rows)
        for name, value in row.items()
        if isinstance(value, Equivalence) and value.other
    }
    after = dict(zip(cells, corrected(list(cells.values())), strict=True))
    return [{name: after.get((i, name), value) for name, value in row.items()} for i, row in enumerate(rows)]


def _number(collection: Collection, row: Row, column: Column) -> Value:
    table = collection.table
    baseline, other = table.baseline_of(row), table.equivalent_of(row)
    papers = table.published_values
    return column.of(
        RowData(
            runs=collection.of(row.name, column.variant),
            baseline=collection.of(baseline, column.variant) if baseline else None,
            equal_to=other,
            equal_runs=collection.of(other, column.variant) if other else (),
            published=papers.get(row.name, {}),
            baseline_published=papers.get(baseline, {}),
            equal_published=papers.get(other, {}),
        )
    )


def _render(collection: Collection, frame: pd.DataFrame, command: str) -> str:
    table = collection.table
    runs = len(collection.all_runs)
    lines = [f"# {table.title}", "", table.note, "", format_table(frame, "pipe", table), ""]
    lines += ["## Columns", "", *(f"- {line}" for line in definitions(table)), ""]
    if table.published:
        lines += ["## Published", "", *(f"- {line}" for line in published_lines(table.published)), ""]
    lines += ["## Where the numbers come from", ""]
    lines += [f"- Runs: {runs} of {runs + len(collection.missing)} finished"]
    lines += [f"- {line}" for line in describe_origin(collection)]
    lines += [f"- Made by `{command}`"]
    lines += [f"- Runs made by `{reproduce_command(table, collection.root)}`; one by one:", ""]
    for row in table.rows:
        for variant in table.variants or [None]:
            label = ", ".join([row.method, row.topology, *([variant] if variant else [])])
            lines.append(f"    - {label}: `{table.cell(row, 'K', collection.root, variant).command}`")
    missing = _missing(collection)
    if missing:
        lines += ["", "## Missing", "", *(f"- {what}: {why}. `{command}`" for what, why, command in missing)]
    return "\n".join(lines) + "\n"
