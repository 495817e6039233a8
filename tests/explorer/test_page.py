"""The page and its command line: nothing is fetched, plain tables say the same, and a wrong number is named."""

import copy
import json
import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common.explorer import clusters, evidence, live
from common.explorer.page import differences, read_page, render
from scripts.report import main
from tests.experiments.synthetic import write_run

CLAIMS = cache(evidence.claims)  # the same in all tests
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Collects what would be fetched, text, and the cells of tables; tags must nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.fetched += [value for key, value in attrs if key in ("src", "srcset", "data") or tag == "link"]
        if tag not in VOID:
            self.open.append(tag)
        match tag:
            case "table":
                self.tables.append([])
            case "tr":
                self.tables[-1].append([])
            case "td" | "th":
                self.tables[-1][-1].append("")

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture
def small(table, monkeypatch):
    """The small table alone, on few topologies, with one run missing."""
    table = table.model_copy(update={"title": "Small & <odd> </script>"})
    monkeypatch.setattr("common.explorer.data.names_in", lambda _: ["small"])
    monkeypatch.setattr("common.explorer.data.load_table", lambda name: table)
    monkeypatch.setattr("common.explorer.evidence.claims", CLAIMS)
    monkeypatch.setattr(clusters, "WORKERS", (2, 4))
    monkeypatch.setattr(clusters, "EXAMPLES", clusters.EXAMPLES[1:2])
    for cell in list(table.cells(Path("my runs")))[1:]:
        write_run(cell.run_dir, cell.overrides)
    return table


def test_the_page_holds_everything(small):
    assert main(["output=site/explorer.html", "runs=my runs"]) == 0
    text = Path("site/explorer.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"@[A-Z]+@|@import|url\(", text.partition("<body>")[0])
    assert len(text) < 6e6
    data = read_page(Path("site/explorer.html"))[0]
    assert data["tables"]["small"]["title"] == "Small & <odd> </script>"
    rows = next(table for table in page.tables if table[0][:3] == ["row", "variant", "seeds"])
    assert rows == [
        ["row", "variant", "seeds", "mean accuracy", "2 sigma"],
        ["AllReduce, complete", "", "2", "90", "0"],
        ["AccumAdam, aer", "", "3", "90", "0"],
    ]
    curves = next(table for table in page.tables if table[0][3:4] == ["at 25%"])
    assert curves[1] == ["AllReduce, complete", "", "30", "50", "50", "90", "90"]
    claims = page.tables[0]
    assert [line[0] for line in claims[1:]] == [claim["claim"] for claim in data["claims"]]


def test_a_number_that_does_not_follow_from_a_record_is_named(small, capsys):
    own = ["output=page.html", "runs=my runs"]
    assert main([*own, "--check"]) == 2
    assert "page.html: no such file; python -m scripts.report output=page.html" in capsys.readouterr().err
    assert main(own) == 0
    assert main([*own, "--check"]) == 0
    assert "page.html: every number follows from the records" in capsys.readouterr().out
    page, (data, _) = Path("page.html"), read_page(Path("page.html"))
    accuracy = data["tables"]["small"]["quantities"].index("accuracy")
    wrong = copy.deepcopy(data)
    wrong["tables"]["small"]["runs"][1]["values"][accuracy] = 91
    page.write_text(render(wrong))
    assert main([*own, "--check"]) == 1
    assert f"tables.small.runs[1].values[{accuracy}]: 91 on the page, 90 by the records" in capsys.readouterr().err
    assert main(own) == 0
    page.write_text(page.read_text().replace("<td class=n>90</td>", "<td class=n>99</td>"))
    assert main([*own, "--check"]) == 1
    assert "its tables, scripts or style differ from what this code makes from its data" in capsys.readouterr().err
    page.write_text("<html></html>")
    assert main([*own, "--check"]) == 2


def test_every_kind_of_difference_is_named():
    records = {"a": [1, 2.0, None], "b": {"c": "x"}, "d": 1e-9, "t": True}
    assert not [*differences(copy.deepcopy(records), records)]
    assert not [*differences(records | {"d": 1.000001e-9}, records)]  # rounded otherwise
    for change, named in [
        ({"a": [1, 2.1, None]}, "a[1]: 2.1 on the page, 2.0 by the records"),
        ({"a": [1, 2.0]}, "a: 2 entries on the page, 3 by the records"),
        ({"a": [1, 2.0, 0]}, "a[2]: 0 on the page, None by the records"),
        ({"b": {}}, "b.c: missing on the page"),
        ({"b": {"c": "x", "e": 1}}, "b.e: only on the page"),
        ({"d": 2e-9}, "d: 2e-09 on the page, 1e-09 by the records"),
        ({"t": 1}, "t: 1 on the page, True by the records"),
    ]:
        assert [*differences(records | change, records)] == [named]


def test_runs_of_no_table_are_shown_too(small):
    write_run(Path("my runs/mine/seed_1"), ["seed=1"], environment={"command": "python -m cnn.train name=mine"})
    assert main(["output=page.html", "runs=my runs"]) == 0
    loose = read_page(Path("page.html"))[0]["tables"]["other_runs"]
    assert [row["id"] for row in loose["rows"]] == ["my runs/mine/seed_1"]
    assert loose["rows"][0]["commands"] == ["python -m cnn.train name=mine"]


def unfinished(folder: str, step: int, *, status: str | None = None, lock: bool = False, **training) -> Path:
    path = write_run(Path(folder), [], train_loss=[3.0, 2.5], steps=step, epochs=1, time_step_ms=500.0)
    config = path / "config.yaml"
    config.write_text(config.read_text() + f"training: {json.dumps({'steps': None, 'epochs': None} | training)}\n")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "split": "tr')  # it is being written
    summary = path / "summary.json"
    summary.write_text(json.dumps({"status": status})) if status else summary.unlink()
    if lock:
        (path / ".lock").touch()
    return path


def test_unfinished_runs_say_how_far_they_are():
    unfinished("runs/a", 20, steps=80, lock=True)
    unfinished("runs/b", 20, epochs=4.0)
    unfinished("runs/c", 20, steps=20, status="failed")
    os.utime(unfinished("runs/killed", 20, steps=80, lock=True) / ".lock", (0, 0))
    write_run(Path("runs/done"), [])
    first, *others = live.unfinished([Path("runs")])
    assert (first["run"], first["state"], first["step"], first["share"], first["loss"]) == (
        "runs/a",
        "running",
        20,
        0.25,
        2.5,
    )
    assert first["seconds_left"] == 30  # 60 steps of 0.5 s
    assert first["curve"] == [[10, 3], [20, 2.5]]
    assert first["validation"] == {"accuracy": 90}
    assert [(line["run"], line["state"], line["share"]) for line in others] == [
        ("runs/b", "stopped", 0.25),
        ("runs/c", "failed", 1),
        ("runs/killed", "stopped", 0.25),
    ]
    assert [line["seconds_left"] for line in others] == [None] * 3
    assert len(live.ended([Path("runs")])) == 2


def test_watching_makes_the_page_anew_until_interrupted(small, monkeypatch, capsys):
    """Its data only once more runs have ended."""
    unfinished("my runs/going", 20, steps=80, lock=True)
    shares, built = [], []

    def sleep(seconds: float) -> None:
        assert seconds == 5
        _, running = read_page(Path("runs/report/explorer.html"))
        shares.append([run["share"] for run in running])
        if len(shares) == 1:
            config = Path("my runs/going/config.yaml")
            config.write_text(config.read_text().replace("80", "40"))
        elif len(shares) == 2:
            write_run(Path("my runs/going"), [])
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("scripts.report.time.sleep", sleep)
    monkeypatch.setattr("scripts.report.build", lambda roots: built.append(roots) or TINY)
    assert main(["runs=my runs", "watch=true", "every=5"]) == 130
    assert shares == [[0.25], [0.5], []]
    assert len(built) == 2
    assert "unfinished runs: 1" in capsys.readouterr().out


TINY = {
    **{key: [] for key in ("claims", "grids", "commits", "distances")},
    **{key: {} for key in ("records", "tables", "quantities", "curves", "sweeps", "seeds")},
    "gap": {"points": [], "causes": {}, "units": {}, "sources": {}},
    "topologies": {"families": {}, "shared": [], "candidates": []},
    "planner": {"examples": []},
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "watch=true"], "check=true: expected without watch=true"),
        (["every=0", "watch=true"], "every=0: expected greater than 0"),
        (["outptu=x"], "outptu: unknown key; did you mean 'output'?"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
