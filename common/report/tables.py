"""A table of runs with the published numbers beside them, definitions, origin and missing runs."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Collection as Some
from pathlib import Path

import pandas as pd

from common.atomic import write_atomically
from common.experiments.collect import Collection, reproduce_command, score_arguments
from common.experiments.columns import Column
from common.experiments.sweeps import sweep_command
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.origin import describe_origin
from common.report.published import load_published
from common.report.statistics import columns_of, definition, exact, is_spread_of, show

FORMATS = ("csv", "md")  # of what else can be made, tex


def build_table(collection: Collection) -> pd.DataFrame:
    """Return a frame with the table's rows and columns: labels, numbers, comparisons; None where there is nothing.

    Rows without a finished run stay, with seeds = 0.
    """
    table = collection.table
    labels = pd.DataFrame([_labels(collection, row) for row in table.rows], dtype=object)
    # Plain objects: pandas would turn None (no number) into NaN (a run that diverged).
    numbers = pd.DataFrame(columns_of(collection), index=labels.index, dtype=object)
    return pd.concat([labels, numbers], axis="columns")[[column.name for column in table.columns]]


def write_table(collection: Collection, folder: Path, command: str, formats: Some[str] = FORMATS) -> list[Path]:
    """Write <folder>/<table> in these formats and return the paths; `command` is what the user typed."""
    table, frame = collection.table, build_table(collection)
    parts = [
        pd.DataFrame([exact(column, value) for value in frame[column.name]], dtype=object) for column in table.columns
    ]
    makers = {
        "csv": lambda: csv_text(pd.concat(parts, axis="columns")),
        "md": lambda: _render(collection, frame, command),
        "tex": lambda: latex(readable(frame, table), left_of(table), table.title, f"Made by {command}"),
    }
    return write_files(folder / table.name, makers, formats)


def left_of(table: Table) -> list[str]:
    """Return the names of the columns that are aligned to the left."""
    return [column.name for column in table.columns if not column.quantity and column.name not in ("workers", "seeds")]


def headings(table: Table) -> dict[str, tuple[Column, Column | None]]:
    """Return what readers see: {heading: (column, the deviations that share it with the column)}."""
    spread_of = {c: spread for c in table.numbers for spread in table.numbers if is_spread_of(spread, c)}
    own = [column for column in table.columns if column not in spread_of.values()]
    return {f"{c.name} ± 2sigma" if c in spread_of else c.name: (c, spread_of.get(c)) for c in own}


def readable(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return a table of runs as texts; a number and its 2 sigma share a column."""
    shown = {}
    for heading, (column, spread) in headings(table).items():
        texts = [show(column, value) for value in frame[column.name]]
        if spread is not None:
            spreads = [show(spread, value) for value in frame[spread.name]]
            texts = [f"{a} ± {b}" if b else a for a, b in zip(texts, spreads, strict=True)]
        if column.quantity is not None and column.quantity.name == "learning_rate":
            marks = [mark(table, row, column) for row in table.rows]
            numbers = frame[column.name].notna()
            texts = [text + mark * number for text, mark, number in zip(texts, marks, numbers, strict=True)]
        shown[heading] = texts
    return pd.DataFrame(shown)


def mark(table: Table, row: Row, column: Column) -> str:
    """Return what readers must know of a row's learning rate, behind it."""
    if not row.takes_tuned or table.untuned:
        return ""
    tuned = table.tuned.methods[table.method(row, column.variant)]
    marks = ["inherited"] * (row.tuned_with not in (None, row.name))
    marks += ["edge"] * bool(tuned.edge) + [*(tuned.ends or ())]
    return f" ({', '.join(marks)})" if marks else ""


def format_texts(shown: pd.DataFrame, style: str, left: Some[str]) -> str:
    """Return texts as a table in one of tabulate's styles: these columns to the left, others to the right."""
    align = ["left" if column in left else "right" for column in shown.columns]
    return shown.to_markdown(index=False, tablefmt=style, disable_numparse=True, colalign=align)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV: ten digits, empty where there is None."""
    texts = frame.map(lambda v: "" if v is None else f"{v:.10g}" if isinstance(v, float) else str(v))
    return texts.to_csv(index=False, lineterminator="\n")


def latex(shown: pd.DataFrame, left: Some[str], title: str, origin: str) -> str:
    """Return texts as a LaTeX table, a float with its title."""
    body = format_texts(shown, "latex_booktabs", left).replace("±", r"$\pm$")
    caption = title.replace("%", r"\%").replace("&", r"\&").replace("_", r"\_")
    lines = [f"% {origin}; needs \\usepackage{{booktabs}}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
    return "\n".join([*lines, body, r"\end{table}", ""])


def write_files(path: Path, makers: Mapping[str, Callable[[], str]], formats: Some[str]) -> list[Path]:
    """Write <path>.<format> for each format and return the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {form: path.with_name(f"{path.name}.{form}") for form in formats}
    for form, file in files.items():
        write_atomically(file, makers[form]().encode())
    return list(files.values())


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
    return [f"`{column.name}`: {definition(table, column)}" for column in table.columns]


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


def _render(collection: Collection, frame: pd.DataFrame, command: str) -> str:
    table = collection.table
    runs = len(collection.all_runs)
    lines = [f"# {table.title}", "", table.note, "", format_texts(readable(frame, table), "pipe", left_of(table)), ""]
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
