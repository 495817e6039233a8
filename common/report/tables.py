"""Builds a table from its runs: CSV for machines, Markdown with definitions and origin for people."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from common.report.collect import Collection, reproduce_command
from common.report.columns import LABELS, define, split_variant, style_of, value_of
from common.report.origin import describe_origin
from common.report.registry import Row, Table


def build_table(collection: Collection) -> pd.DataFrame:
    """One row for each row of the table, columns as the table's file says; None where there is no number.

    Rows without a finished run stay, with seeds = 0.
    """
    table = collection.table
    rows = [_build_row(collection, row) for row in table.rows]
    # Plain objects: pandas would turn None (no number) into NaN (a run that diverged).
    return pd.DataFrame(rows, columns=list(table.columns), dtype=object)


def write_table(collection: Collection, folder: Path, command: str) -> tuple[Path, Path]:
    """Writes <folder>/<table>.csv and .md and returns their paths; `command` is what the user typed."""
    folder.mkdir(parents=True, exist_ok=True)
    frame = build_table(collection)
    csv, markdown = (folder / f"{collection.table.name}.{suffix}" for suffix in ("csv", "md"))
    frame.map(_exact).to_csv(csv, index=False, lineterminator="\n")
    markdown.write_text(_render(collection, frame, command), encoding="utf-8")
    return csv, markdown


def format_table(frame: pd.DataFrame, style: str, variants: Iterable[str] = ()) -> str:
    """The table as text in one of tabulate's styles ("pipe" is Markdown)."""
    shown = frame.copy()
    for column in frame.columns:
        plain = split_variant(column, variants)[1]
        shown[column] = [_readable(plain, value) for value in frame[column]]
    align = ["left" if column in ("method", "topology") else "right" for column in frame.columns]
    return shown.to_markdown(index=False, tablefmt=style, disable_numparse=True, colalign=align)


def missing_lines(collection: Collection) -> list[str]:
    """One line for each missing run: which, why, and the command that makes it."""
    return [f"{m.cell.label}: {m.reason}: {m.cell.command}" for m in collection.missing]


def _build_row(collection: Collection, row: Row) -> dict[str, object]:
    table, runs = collection.table, collection.of(row.name)
    workers = sorted({int(run.total("workers")) for run in runs})
    labels = {
        "method": row.method,
        "topology": row.topology,
        "workers": workers[0] if len(workers) == 1 else "/".join(map(str, workers)) or None,
        "seeds": min(len(collection.of(row.name, variant)) for variant in table.variants or [None]),
    }
    return {c: labels[c] if c in labels else _value(collection, row, c) for c in table.columns}


def _value(collection: Collection, row: Row, column: str) -> float | None:
    variant, plain = split_variant(column, collection.table.variants)
    return value_of(plain, collection.of(row.name, variant))


def _definition(table: Table, column: str) -> str:
    variant, plain = split_variant(column, table.variants)
    return define(plain) if variant is None else f"{variant}: {define(plain)}"


def _exact(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _readable(column: str, value: object) -> str:
    if value is None:
        return ""
    return str(value) if column in LABELS else format(value, style_of(column))


def _render(collection: Collection, frame: pd.DataFrame, command: str) -> str:
    table = collection.table
    runs = len(collection.all_runs)
    lines = [f"# {table.title}", "", table.note, "", format_table(frame, "pipe", table.variants), ""]
    lines += ["## Columns", "", *(f"- `{column}`: {_definition(table, column)}" for column in table.columns), ""]
    lines += ["## Where the numbers come from", ""]
    lines += [f"- Runs: {runs} of {runs + len(collection.missing)} finished"]
    lines += [f"- {line}" for line in describe_origin(collection)]
    lines += [f"- Made by `{command}`"]
    lines += [f"- Runs made by `{reproduce_command(table, collection.root)}`; one by one:", ""]
    for row in table.rows:
        for variant in table.variants or [None]:
            label = ", ".join([row.method, row.topology, *([variant] if variant else [])])
            lines.append(f"    - {label}: `{table.cell(row, 'K', collection.root, variant).command}`")
    if collection.missing:
        lines += ["", "## Missing", ""]
        lines += [f"- {m.cell.label}: {m.reason}. `{m.cell.command}`" for m in collection.missing]
    return "\n".join(lines) + "\n"
