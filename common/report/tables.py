"""A table of runs next to the published numbers, with definitions, origin and missing runs."""

import shlex
from collections.abc import Collection as Some
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from common.atomic import write_atomically
from common.experiments.collect import Collection, reproduce_command, score_arguments
from common.experiments.definitions import ROOT
from common.experiments.quantities import Column
from common.experiments.sweeps import sweep_command
from common.experiments.table_file import MOST_SHOWN, Row
from common.experiments.tables import Table
from common.report.origin import describe_origin
from common.report.published import published_lines
from common.report.statistics import columns_of, definition, exact, show

TABLES = ROOT / "results" / "tables"
SPREADS = {"mean": "2sigma", "published": "published_2sigma"}  # shown after these and a plus-minus sign


def build_table(collection: Collection) -> pd.DataFrame:
    """Return a frame with the table's rows and columns: labels, numbers, comparisons; None where there is nothing.

    Rows without a finished run stay, with seeds = 0.
    """
    table = collection.table
    labels = pd.DataFrame([_labels(collection, row) for row in table.rows], dtype=object)
    # Plain objects: pandas would turn None (no number) into NaN (a run that diverged).
    numbers = pd.DataFrame(columns_of(collection), index=labels.index, dtype=object)
    return pd.concat([labels, numbers], axis="columns")[[column.name for column in table.columns]]


def _labels(collection: Collection, row: Row) -> dict[str, object]:
    table = collection.table
    workers = sorted({int(run.total("workers")) for run in collection.of(row.name)})
    counts = [len(collection.of(row.name, variant)) for variant in table.variants or [None]]
    return {
        "method": row.method,
        "topology": row.topology,
        "workers": workers[0] if len(workers) == 1 else "/".join(map(str, workers)) or row.workers,
        "seeds": counts[0] if len(set(counts)) == 1 else "/".join(map(str, counts)),  # 3/0 where variants differ
        **row.labels,
    }


def write_table(collection: Collection, folder: Path, command: str, kept: bool = False) -> list[Path]:
    """Write <folder>/<table>.csv with all columns and .md with the shown columns; return the paths.

    command: makes the files again
    kept:    whether these are the kept files in results/tables, whose page has the findings and links
    """
    table, frame = collection.table, build_table(collection)
    parts = [
        pd.DataFrame([exact(column, value) for value in frame[column.name]], dtype=object) for column in table.columns
    ]
    text = csv_text(pd.concat(parts, axis="columns"))
    return write_texts(folder / table.name, {"csv": text, "md": table_page(collection, frame, command, kept)})


def table_page(collection: Collection, frame: pd.DataFrame, command: str, kept: bool) -> str:
    """Return the page of a table in Markdown; see `write_table`."""
    table, runs = collection.table, len(collection.all_runs)
    made_by = []
    for row in table.rows:
        for variant in table.variants or [None]:
            label = ", ".join([row.method, row.topology, *([variant] if variant else [])])
            made_by.append(f"    - {label}: `{table.cell(row, 'K', collection.root, variant).command}`")
    parts = {
        "Columns": legend(table, frame),
        "Published": published_lines(table.published),
        "Where the numbers come from": [
            f"Runs: {runs} of {runs + len(collection.missing)} finished",
            *describe_origin(collection),
            f"Made by `{command}`",
            "\n".join([f"Runs made by `{reproduce_command(table, collection.root)}`; one by one:", "", *made_by]),
        ],
        "Missing": [f"{what}: {why}" + f". `{do}`" * bool(do) for what, why, do in _missing(collection, kept)],
    }
    texts = f"{markdown(shown(frame, table), left_of(table))}\n\n{_caption(table, frame, kept)}"
    return page(table.title, table.note, texts, table.findings if kept else "", parts)


def _caption(table: Table, frame: pd.DataFrame, kept: bool) -> str:
    """Return workers and seeds, if all rows share them and no column shows them, and links to more."""
    seen = {column.name for column in shown_columns(table)}
    alike = [
        f"{frame[name].iloc[0]} {name}"
        for name in ("workers", "seeds")
        if name in frame and name not in seen and frame[name].nunique() == 1
    ]
    more = {"figure": f"../figures/{table.name}.png", "tuning": f"../sweeps/{table.tuned_by or table.name}.md"}
    links = [f"[{what}]({file})" for what, file in more.items() if kept and (TABLES / file).exists()]
    return f"{', '.join(alike)}. " * bool(alike) + ", ".join([f"[All columns]({table.name}.csv)", *links])


# What pages show.


def left_of(table: Table) -> list[str]:
    """Return the names of the columns that are aligned to the left."""
    return [column.name for column in table.columns if not column.quantity and column.name not in ("workers", "seeds")]


def shown_columns(table: Table) -> dict[Column, Column | None]:
    """Return the columns that the table's `shown` names, else the first seven, each with its column of deviations."""
    by_key = {(column.variant, column.quantity, column.statistic): column for column in table.numbers}
    spreads = {c: by_key.get((c.variant, c.quantity, SPREADS.get(c.statistic))) for c in table.columns}
    columns = {column.name: column for column in table.columns}
    chosen = [columns[name] for name in table.shown if name in columns] or table.columns
    beside = {spreads[column] for column in chosen}
    return {column: spreads[column] for column in [c for c in chosen if c not in beside][:MOST_SHOWN]}


def _heading(column: Column, spread: Column | None) -> str:
    if spread is not None:
        return f"{column.name} ± 2sigma"
    return column.name.replace("_equivalent", " equal?") if column.name.endswith("_equivalent") else column.name


def shown(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return the columns that pages show, at most seven, as texts; a number and its 2 sigma share a column."""
    texts = {}
    for column, spread in shown_columns(table).items():
        cells = [show(column, value) for value in frame[column.name]]
        if spread is not None:
            spreads = [show(spread, value) for value in frame[spread.name]]
            cells = [f"{a} ± {b}" if b else a for a, b in zip(cells, spreads, strict=True)]
        if column.quantity is not None and column.quantity.name == "learning_rate":
            marks = [mark(table, row, column) for row in table.rows]
            numbers = frame[column.name].notna()
            cells = [text + mark * number for text, mark, number in zip(cells, marks, numbers, strict=True)]
        texts[_heading(column, spread)] = cells
    return pd.DataFrame(texts)


def mark(table: Table, row: Row, column: Column) -> str:
    """Return the remark that follows a row's learning rate: values inherited, or best at an end; "" if neither."""
    if not row.takes_tuned or table.untuned:
        return ""
    tuned = table.tuned.methods.get(table.method(row, column.variant))
    if tuned is None:  # the column is over variants, and each was tuned by itself
        return ""
    marks = ["inherited"] * (row.tuned_with not in (None, row.name)) + ["edge"] * bool(tuned.edge)
    return f" ({', '.join(marks)})" if marks else ""


def legend(table: Table, frame: pd.DataFrame) -> list[str]:
    """Return a line for each column that a page shows."""
    lines = []
    for column, spread in shown_columns(table).items():
        text = definition(table, column) + ", ± 2 sample standard deviations" * (spread is not None)
        if column.statistic == "equivalent":
            text += f". {_compared(table, column, frame)}"
        elif column.quantity is not None and column.quantity.name == "learning_rate" and table.tuned:
            text += "; (inherited): tuned for another row; (edge): best at an end of the grid"
        lines.append(f"`{_heading(column, spread)}`: {text}")
    return lines


def _compared(table: Table, column: Column, frame: pd.DataFrame) -> str:
    """Return which rows are tested to be equal, and how large the published differences are, where they are known."""
    published = frame.get(column.name.replace("_equivalent", "_published_equivalent"), [None] * len(frame))
    known: dict[str, list[str]] = {f"{row} to {other}": [] for row, other in table.equivalent.items()}
    for row, value in zip(table.rows, published, strict=True):
        name = row.name.removesuffix(f"_{row.workers}")
        if name in table.equivalent and value is not None:
            known[f"{name} to {table.equivalent[name]}"].append(f"{value:+{column.quantity.style}}")
    return "; ".join(pair + f" (published difference {', '.join(of)})" * bool(of) for pair, of in known.items())


def missing_summary(collection: Collection) -> list[str]:
    """Return lines on missing runs and runs without scores of the test set: which, why, and the command.

    A single line stands for everything that is missing for the same reason.
    """
    by_reason: dict[str, list[tuple[str, str, str]]] = {}
    for each in _missing(collection):
        by_reason.setdefault(each[1], []).append(each)
    table = collection.table
    of_all = sweep_command(table.tuned_by or table.name) if table.untuned else reproduce_command(table, collection.root)
    lines = [
        (f"{len(these)} runs, the first is {these[0][0]}", why, these[0][2] and of_all) if len(these) > 1 else these[0]
        for why, these in by_reason.items()
    ]
    return [": ".join(filter(None, line)) for line in lines]


def _missing(collection: Collection, kept: bool = False) -> list[tuple[str, str, str]]:
    """Return triples: what is missing, why, and the command that makes it, if any; kept: on any machine, else here."""
    table = collection.table
    tuning = sweep_command(table.tuned_by or table.name) if table.untuned else None
    runs = [
        (cell.label, why, tuning or ("" if lacking else cell.command if kept else cell.command_here))
        for cell, why, lacking in collection.missing
    ]
    scores = [(str(run.folder), score_arguments(table, run.folder)) for run in collection.all_runs]
    return runs + [(run, "no scores of the test set", shlex.join(["python", *call])) for run, call in scores if call]


# Text formats.


def format_texts(shown: pd.DataFrame, left: Some[str]) -> str:
    """Return texts as a table for the console, with the columns in `left` aligned left, others right."""
    align = ["left" if column in left else "right" for column in shown.columns]
    return shown.to_markdown(index=False, tablefmt="simple", disable_numparse=True, colalign=align)


def markdown(shown: pd.DataFrame, left: Some[str]) -> str:
    """Return texts as a Markdown table without padding, with the columns in `left` aligned left, others right."""
    rule = ["---" if column in left else "---:" for column in shown.columns]
    rows = [list(shown.columns), rule, *shown.astype(str).values.tolist()]
    cells = ([" ".join(cell.split("\n")).replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def page(title: str, note: str, table: str, findings: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return a page in Markdown: title, note, table, findings, and a list below each heading that has points."""
    blocks = [f"# {title}", note, table, *(["## Findings", findings.strip()] if findings else [])]
    for heading, points in parts.items():
        blocks += [f"## {heading}", "\n".join(f"- {point}" for point in points)] if points else []
    return "\n\n".join(filter(None, blocks)) + "\n"


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV: ten digits, empty where there is None."""
    texts = frame.map(lambda v: "" if v is None else f"{v:.10g}" if isinstance(v, float) else str(v))
    return texts.to_csv(index=False, lineterminator="\n")


def write_texts(path: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write <path>.<ending> for each ending and return the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {path.with_name(f"{path.name}.{ending}"): text for ending, text in texts.items()}
    for file, text in files.items():
        write_atomically(file, text.encode())
    return [*files]
