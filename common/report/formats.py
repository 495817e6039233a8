"""Tables as text and files: CSV for machines; Markdown, LaTeX and the console's format for people."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from common.report.columns import LABELS, split_column, split_variant, style_of
from common.report.registry import Table

LEFT = ("method", "topology", "source", "cluster")  # labels, which stand to the left


def exact(value: object) -> str:
    """A value as CSV files hold it: ten digits, nothing where there is no number."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def format_table(frame: pd.DataFrame, style: str, table: Table) -> str:
    """A table of runs in one of tabulate's styles; "pipe" is Markdown."""
    return format_texts(readable(frame, table), style, table.labels)


def readable(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """A table of runs as texts; a number and its 2 sigma share a column."""
    spreads = {spread for column in frame.columns if (spread := _spread_of(column)) in frame.columns}
    shown = {}
    for column in frame.columns:
        if column in spreads:
            continue
        spread = _spread_of(column)
        texts = _texts(frame, column, table)
        if spread in spreads:
            texts = [f"{a} ± {b}" if b else a for a, b in zip(texts, _texts(frame, spread, table), strict=True)]
            column = f"{column} ± 2sigma"
        shown[column] = texts
    return pd.DataFrame(shown)


def format_texts(shown: pd.DataFrame, style: str, labels: Collection[str] = ()) -> str:
    """Texts as a table: labels to the left, numbers to the right."""
    align = ["left" if column in (*LEFT, *labels) else "right" for column in shown.columns]
    return shown.to_markdown(index=False, tablefmt=style, disable_numparse=True, colalign=align)


def latex(table: str, title: str, origin: str) -> str:
    """A table in tabulate's style latex_booktabs, as a float with its title."""
    body = table.replace("±", r"$\pm$")
    caption = title.replace("%", r"\%").replace("&", r"\&").replace("_", r"\_")
    lines = [f"% {origin}; needs \\usepackage{{booktabs}}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
    return "\n".join([*lines, body, r"\end{table}", ""])


def write_files(path: Path, frame: pd.DataFrame, markdown: str, tex: str) -> list[Path]:
    """Writes <path>.csv, .md and .tex and returns them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("csv", "md", "tex")]
    frame.map(exact).to_csv(files[0], index=False, lineterminator="\n")
    for file, text in zip(files[1:], (markdown, tex), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def _spread_of(column: str) -> str | None:
    """The column that holds the 2 sigma of this one, if the table has it."""
    if column.endswith("_published"):
        return f"{column}_2sigma"
    return f"{column.removesuffix('_mean')}_2sigma" if column.endswith("_mean") else None


def _texts(frame: pd.DataFrame, column: str, table: Table) -> list[str]:
    if column in table.labels:
        return list(frame[column])
    plain = split_variant(column, table.variants)[1]
    return [_readable(plain, value) for value in frame[column]]


def _readable(column: str, value: object) -> str:
    if column in LABELS:
        return "" if value is None else str(value)
    if value is not None:
        return format(value, style_of(column))
    kind = split_column(column)[1]
    if kind == "published":
        return "unknown"
    return "missing" if kind == "mean" else ""
