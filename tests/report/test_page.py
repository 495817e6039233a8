"""The HTML page: everything is in it or beside it on the disk."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from common.experiments.definitions import ROOT
from common.report.figures import Curves, figure_names, load_figure
from common.report.page import sections_of
from scripts.benchmarks.record import Benchmark
from scripts.report import main
from tests.experiments.synthetic import write_run

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Collects links, pictures and text; tags must nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        attributes = dict(attrs)
        assert tag not in ("script", "link"), "nothing that needs a server"
        if tag == "a":
            self.links.append(attributes["href"])
        if tag == "img":
            self.images.append(attributes["src"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def only(monkeypatch, tables=(), figures=()) -> None:
    """Show these tables and figures, and none of benchmarks."""
    for names, value in {"table_names": tables, "benchmark_names": (), "figure_names": figures}.items():
        monkeypatch.setattr(f"common.report.page.{names}", lambda value=value: list(value))


def test_page(table, monkeypatch):
    """The small table with all runs but one, and what is published."""
    table = table.model_copy(update={"title": "Small & <odd>"})
    only(monkeypatch, ["small"])
    monkeypatch.setattr("common.report.page.load_table", lambda name: table)
    for cell in list(table.cells(Path("my runs")))[1:]:
        write_run(cell.run_dir, cell.overrides)
    assert main(["output=site/report.html", "runs=my runs"]) == 0
    page = Page(Path("site/report.html").read_text())
    assert page.open == []
    assert all(image.startswith("data:image/") for image in page.images)
    assert len(page.images) == 1
    assert page.text.count("Small & <odd>") == 2  # in the index, too
    assert "90.00 ± 0.00" in page.text
    assert "Test CPU, 2 cores, no GPU" in page.text
    assert page.text.index("Tables") < page.text.index("Small &") < page.text.index("Published alone")
    assert "Time in the figure: predicted by the runtime model for a larger model" in page.text
    assert "0123456789ab" in page.text
    assert "allreduce seed 1: not run yet. python -m cnn.train experiment=small" in page.text
    local = [link for link in page.links if not link.startswith("#")]
    assert len(local) == 5 * 4  # runs x files
    assert all((Path("site") / unquote(link)).is_file() for link in local)
    assert "All-reduce baselines: ResNet-50 on ImageNet-1K" in page.text
    assert "77.386" in page.text


def test_every_figure_of_this_project_has_its_picture_before_any_run(monkeypatch, tmp_path):
    figures = [load_figure(name) for name in figure_names()]
    only(monkeypatch, sorted({figure.table for figure in figures if isinstance(figure, Curves)}), figure_names())
    sections = sections_of([Path("none")], ROOT / "results" / "benchmarks", tmp_path)
    pictures = {section.name: section.text.count("![") for section in sections if section.group == "Figures"}
    assert pictures == {f"figure_{name}": 1 for name in figure_names()}


def test_records_of_benchmarks_are_shown_as_they_are(monkeypatch):
    only(monkeypatch)
    columns = {"engine": "whose code", "step_ms": "of a step", "ratio": "to the other's"}
    rows = [{"engine": "ours", "step_ms": 1234.5678}, {"engine": "theirs", "step_ms": 2000000, "ratio": 1}]
    benchmark = Benchmark("race", "A race", columns, {})
    texts = ["Two took part in [the\nrace](race.csv).", "- ours: once\n- theirs: twice"]
    benchmark.write(rows, texts, "records", "python -m race", "1 used")
    assert main(["output=report.html", "benchmarks=records"]) == 0
    page = Page(Path("report.html").read_text())
    assert page.open == []
    assert "records/race.csv" in page.links
    for text in (
        "A race",
        "1234.57",
        "Two took part in",
        "theirs: twice",
        "whose code",
        "python -m race",
        "Hardware: ",
    ):
        assert text in page.text
    assert "<table>" in Path("report.html").read_text()


def test_output_is_needed(capsys):
    assert main([]) == 2
    assert "output=...: missing; expected the HTML file" in capsys.readouterr().err
