"""Excerpts of tables between a README's markers."""

from pathlib import Path

import pytest

from common.cli import UsageError
from common.report.excerpts import Excerpt, load_excerpt, show_excerpt
from scripts.tables import main

RECORD = """engine,topology,hosts,ms
ours,ring,4,100
ours,ring,8,50
ours,aer,4,80
peer,ring,4,200
peer,ring,8,
peer,aer,4,100
"""
SPEED = {"record": "speed", "rows": {"engine": "{engine}"}, "cells": {"ms": "{ms:.0f}"}}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A benchmark's record."""
    monkeypatch.setattr("common.report.records.RECORDS", tmp_path)
    (tmp_path / "speed.csv").write_text(RECORD)


def show(**changes) -> list[list[str]]:
    """Return the cells of the excerpt's Markdown, without the line below the headings."""
    lines = show_excerpt(Excerpt.model_validate(SPEED | changes)).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_rows_across_columns(record):
    rows = {"engine": "{engine}", "topology": "{topology}"}
    assert show(rows=rows, across="{hosts} hosts", sort=["topology"]) == [
        ["engine", "topology", "ms, 4 hosts", "ms, 8 hosts"],
        ["ours", "aer", "80", ""],
        ["peer", "aer", "100", ""],
        ["ours", "ring", "100", "50"],
        ["peer", "ring", "200", ""],
    ]


def test_medians_beside_a_baseline(record):
    baseline = {"where": "engine == 'peer'", "by": ["hosts"]}
    cells = {"n": "{n}", "ms": "{ms:.0f} ({ms_ratio:.2f})"}
    shown = show(where="hosts == 4", medians=["engine", "hosts"], baseline=baseline, cells=cells)
    assert shown == [["engine", "n", "ms"], ["ours", "2", "90 (0.60)"], ["peer", "2", "150 (1.00)"]]


def test_columns_of_another_record_and_expressions(record, tmp_path):
    (tmp_path / "steps.csv").write_text("engine,steps\nours,10\npeer,20\n")
    more = {"join": {"steps": ["engine"]}, "assign": {"s": "steps * ms / 1000"}, "cells": {"s": "{s:.1f}"}}
    assert show(where="topology == 'aer'", **more) == [["engine", "s"], ["ours", "0.8"], ["peer", "2.0"]]


def test_only_what_is_between_markers_changes(record, monkeypatch):
    monkeypatch.setattr("common.report.excerpts.load_excerpt", lambda name: Excerpt.model_validate(SPEED))
    text = "# A\n\n<!-- table: speed -->\nold\n<!-- end -->\n\nB <!-- table: other --> C\n"
    Path("A.md").write_text(text)
    assert main(["readme=A.md"]) == 0
    filled = Path("A.md").read_text()
    assert filled.startswith("# A\n\n<!-- table: speed -->\n\n| engine ")
    assert filled.endswith("|\n\n<!-- end -->\n\nB <!-- table: other --> C\n")
    assert "old" not in filled


def test_what_is_wrong_is_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="<!-- table=quikstart: unknown; did you mean 'quickstart'"):
        load_excerpt("quikstart")
    for arguments, message in {
        ("readme=none.md",): "readme=none.md: no such file",
        ("readme=A.md", "table=3"): "readme=A.md: expected no other key",
        (): "table=...: missing; expected a file",
    }.items():
        assert main(list(arguments)) == 2
        assert message in capsys.readouterr().err
