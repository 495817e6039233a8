"""Tables as text and files: CSV for machines; Markdown, LaTeX and the console's format for people."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from common.report.columns import Column, Label
from common.report.registry import Table


def exact(value: object) -> str:
    """Return a value as CSV files hold it: ten digits, empty where there is no number."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def exact_frame(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return a table of runs as CSV files hold it: the numbers of a comparison in columns of their own."""
    parts = [
        pd.DataFrame([column.exact(value) for value in frame[column.name]], dtype=object) for column in table.columns
    ]
    return pd.concat(parts, axis="columns")


def format_table(frame: pd.DataFrame, style: str, table: Table) -> str:
    """Return a table of runs in one of tabulate's styles; "pipe" is Markdown."""
    return format_texts(readable(frame, table), style, left_of(table))


def left_of(table: Table) -> list[str]:
    """Return the names of the columns that are aligned to the left."""
    return [column.name for column in table.columns if isinstance(column, Label) and column.left]


def headings(table: Table) -> dict[str, tuple[Column | Label, Column | None]]:
    """Return what readers see: {heading: (column, the deviations that share it with the column)}."""
    numbers = table.numbers
    spread_of = {column: spread for column in numbers for spread in numbers if spread.is_spread_of(column)}
    own = [column for column in table.columns if column not in spread_of.values()]
    return {f"{c.name} ± 2sigma" if c in spread_of else c.name: (c, spread_of.get(c)) for c in own}


def readable(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return a table of runs as texts; a number and its 2 sigma share a column."""
    shown = {}
    for heading, (column, spread) in headings(table).items():
        texts = [column.show(value) for value in frame[column.name]]
        if spread is not None:
            spreads = [spread.show(value) for value in frame[spread.name]]
            texts = [f"{a} ± {b}" if b else a for a, b in zip(texts, spreads, strict=True)]
        if isinstance(column, Column):
            marks = [table.mark(row, column) for row in table.rows]
            numbers = frame[column.name].notna()
            texts = [text + mark * number for text, mark, number in zip(texts, marks, numbers, strict=True)]
        shown[heading] = texts
    return pd.DataFrame(shown)


def format_texts(shown: pd.DataFrame, style: str, left: Collection[str]) -> str:
    """Return texts as a table: these columns to the left, others to the right."""
    align = ["left" if column in left else "right" for column in shown.columns]
    return shown.to_markdown(index=False, tablefmt=style, disable_numparse=True, colalign=align)


def latex(table: str, title: str, origin: str) -> str:
    """Return a table in tabulate's style latex_booktabs as a float with its title."""
    body = table.replace("±", r"$\pm$")
    caption = title.replace("%", r"\%").replace("&", r"\&").replace("_", r"\_")
    lines = [f"% {origin}; needs \\usepackage{{booktabs}}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
    return "\n".join([*lines, body, r"\end{table}", ""])


def write_files(path: Path, frame: pd.DataFrame, markdown: str, tex: str) -> list[Path]:
    """Write <path>.csv, .md and .tex and return their paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("csv", "md", "tex")]
    frame.map(exact).to_csv(files[0], index=False, lineterminator="\n")
    for file, text in zip(files[1:], (markdown, tex), strict=True):
        file.write_text(text, encoding="utf-8")
    return files
