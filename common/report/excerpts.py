"""Excerpts of tables for READMEs: results/definitions/excerpts/<name>.yaml says which rows and columns they show."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field

from common.experiments.collect import collect
from common.experiments.definitions import ROOT, explained, read_definition
from common.experiments.tables import load_table
from common.report.claims import load_claims, show_claims, show_verdicts
from common.report.records import RecordRows
from common.report.tables import build_table, format_texts, readable

EXCERPTS = ROOT / "results" / "definitions" / "excerpts"
KEPT = ROOT / "results" / "runs"
SCOREBOARD = {"claims": show_claims, "verdicts": show_verdicts}
BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)


class Excerpt(RecordRows):
    """What a README shows of a table of kept runs or of a benchmark's record.

    Rows and cells map headings to templates. Templates are filled with the columns of a record, as "{step_ms:.0f}", or
    with the texts of a table of runs under their headings there, as "{top1_mean ± 2sigma}".

    sort:     columns of a record to sort its rows by
    across:   a template; each of its texts becomes a column for every cell
    cells:    in their headings, {margins[<quantity>]} is the table's margin
    """

    table: str | None = Field(None, description="a file of results/definitions/tables")
    sort: list[str] = Field(default_factory=list)
    rows: dict[str, str] = Field(min_length=1)
    across: str = ""
    cells: dict[str, str] = Field(min_length=1)


def load_excerpt(name: str, folder: Path = EXCERPTS) -> Excerpt:
    """Read an excerpt's file; UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="<!-- table")
    with explained(folder, name, Excerpt):
        return Excerpt.model_validate(content)


def fill_tables(text: str) -> str:
    """Return a README with the excerpts between its markers `<!-- table: NAME -->` and `<!-- end -->` made anew.

    The names `claims` and `verdicts` stand for the scoreboard, and for its claims by verdict.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        show = SCOREBOARD.get(name)
        made = show(load_claims()) if show else show_excerpt(load_excerpt(name))
        return f"<!-- table: {name} -->\n\n{made}\n\n<!-- end -->"

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
    frame = excerpt.frame()
    if excerpt.sort:
        frame = frame.sort_values(excerpt.sort, kind="stable")
    return frame.to_dict("records")


def _cell(template: str, row: Mapping[str, Any]) -> str:
    text = template.format_map(row)
    return "" if "nan" in text else text


def _join(heading: str, column: str) -> str:
    return ", ".join(filter(None, (heading, column)))
