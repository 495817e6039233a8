"""Excerpts of tables for READMEs: results/definitions/excerpts/<name>.yaml says which rows and columns they show."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field

from common.cli import UsageError
from common.report.collect import collect
from common.report.definitions import ROOT, Definition, explained, read_definition
from common.report.formats import format_texts, readable
from common.report.registry import load_table
from common.report.tables import build_table

EXCERPTS = ROOT / "results" / "definitions" / "excerpts"
KEPT, RECORDS = ROOT / "results" / "runs", ROOT / "results" / "benchmarks"
BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)


class Baseline(Definition):
    """What a row is compared with: the row that `where` (a query) finds among those with equal values in `by`."""

    where: str
    by: list[str]


class Excerpt(Definition):
    """What a README shows of a table of kept runs or of a benchmark's record.

    Rows and cells map headings to templates. Templates are filled with the columns of a record, as "{step_ms:.0f}", or
    with the texts of a table of runs under their headings there, as "{top1_mean ± 2sigma}".

    where:    the rows to show, as a query of pandas
    sort:     columns of a record to sort its rows by
    medians:  columns that tell rows apart; other numbers become medians over the `n` rows that agree in these
    baseline: gives a record columns `<number>_ratio`, a row's number over the baseline's
    across:   a template; each of its texts becomes a column for every cell
    cells:    in their headings, {margins[<quantity>]} is the table's margin
    """

    table: str | None = Field(None, description="a file of results/definitions/tables")
    record: str | None = Field(None, description="a CSV file of results/benchmarks, without its ending")
    where: str | None = None
    sort: list[str] = Field(default_factory=list)
    medians: list[str] = Field(default_factory=list)
    baseline: Baseline | None = None
    rows: dict[str, str] = Field(min_length=1)
    across: str = ""
    cells: dict[str, str] = Field(min_length=1)


def load_excerpt(name: str, folder: Path = EXCERPTS) -> Excerpt:
    """Read an excerpt's file; UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="<!-- table")
    with explained(folder, name, Excerpt):
        return Excerpt.model_validate(content)


def fill_tables(text: str) -> str:
    """Return a README with the excerpts between its markers `<!-- table: NAME -->` and `<!-- end -->` made anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- table: {match['name']} -->\n\n{show_excerpt(load_excerpt(match['name']))}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def show_excerpt(excerpt: Excerpt) -> str:
    """Return the excerpt as Markdown."""
    source = _texts_of_runs(excerpt) if excerpt.table else _numbers_of_record(excerpt)
    margins = load_table(excerpt.table).margins if excerpt.table else {}
    cells = {heading.format(margins=margins): template for heading, template in excerpt.cells.items()}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    columns = list(dict.fromkeys(excerpt.across.format_map(row) for row in source))
    for row in source:
        line = lines.setdefault(tuple(label.format_map(row) for label in excerpt.rows.values()), {})
        for heading, template in cells.items():
            line[_join(heading, excerpt.across.format_map(row))] = _cell(template, row)
    headings = [_join(heading, column) for heading in cells for column in columns]
    frame = pd.DataFrame(
        [[*label, *(line.get(heading, "") for heading in headings)] for label, line in lines.items()],
        columns=[*excerpt.rows, *headings],
    )
    return format_texts(frame, "pipe", excerpt.rows)


def _texts_of_runs(excerpt: Excerpt) -> list[Mapping[str, Any]]:
    collection = collect(load_table(excerpt.table), KEPT)
    frame = build_table(collection)
    texts = readable(frame, collection.table)
    shown = frame.query(excerpt.where, engine="python") if excerpt.where else frame
    return texts.loc[shown.index].to_dict("records")


def _numbers_of_record(excerpt: Excerpt) -> list[Mapping[str, Any]]:
    path = RECORDS / f"{excerpt.record}.csv"
    if not path.exists():
        raise UsageError(f"{path}: no such record")
    frame = pd.read_csv(path)
    if excerpt.where:
        frame = frame.query(excerpt.where, engine="python")
    if excerpt.medians:
        groups = frame.groupby(excerpt.medians, sort=False)
        frame = groups.median(numeric_only=True).assign(n=groups.size()).reset_index()
    if excerpt.baseline:
        by = excerpt.baseline.by
        numbers = [name for name in frame.select_dtypes("number") if name not in by]
        base = frame.query(excerpt.baseline.where, engine="python")[[*by, *numbers]]
        frame = frame.merge(base, on=by, how="left", suffixes=("", "_ratio"))
        for name in numbers:
            frame[f"{name}_ratio"] = frame[name] / frame[f"{name}_ratio"]
    if excerpt.sort:
        frame = frame.sort_values(excerpt.sort, kind="stable")
    return frame.to_dict("records")


def _cell(template: str, row: Mapping[str, Any]) -> str:
    text = template.format_map(row)
    return "" if "nan" in text else text


def _join(heading: str, column: str) -> str:
    return ", ".join(filter(None, (heading, column)))
