"""One HTML page with the Markdown pages and the pictures of all tables and figures; it opens from disk."""

import base64
import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from markdown_it import MarkdownIt
from tqdm import tqdm

from common.cli import UsageError
from common.experiments.collect import Collection, collect
from common.experiments.definitions import ROOT, names_in
from common.experiments.derived import ASSUMED, is_simulated
from common.experiments.runs import files_of
from common.experiments.sweeps import SWEEPS
from common.experiments.table_file import PAPER
from common.experiments.tables import load_table, table_names
from common.report.benchmark_tables import benchmark_names, benchmark_page, load_benchmark
from common.report.figures import figure_names, load_figure, write_figures
from common.report.published import load_published, published_lines
from common.report.style import save
from common.report.tables import TABLES, build_table, markdown, page, table_page

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1320px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 3rem; border-bottom: 1px solid #ccc; }
nav ul { columns: 2; column-gap: 2.5rem; padding-left: 1.2rem; } nav h3 { font-size: 1rem; margin-bottom: 0; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.8rem; }
th, td { padding: 0.2rem 0.55rem; border-bottom: 1px solid #ddd; }
img { max-width: 100%; border: 1px solid #eee; } details { margin: 0.5rem 0; font-size: 0.85rem; }
summary, a { color: #114a8a; } summary { cursor: pointer; } code { font-size: 0.78rem; }
"""


class Section(NamedTuple):
    """A page in Markdown; its links and pictures are relative to `folder`, `state` stands beside it in the index."""

    group: str
    name: str
    text: str
    folder: Path = TABLES
    state: str = ""


def sections_of(roots: Sequence[Path], benchmarks: Path, drawn: Path) -> Iterator[Section]:
    """Yield sections of tables, tunings, benchmarks, figures, and published numbers that nothing here reproduces.

    drawn: a folder for their pictures
    """
    loaded = map(load_table, tqdm(table_names(), "reading tables"))
    tables = {table.name: collect(table, *roots, allow_empty=True) for table in loaded}
    for collection in tqdm(sorted(tables.values(), key=lambda of: not of.all_runs), "drawing tables"):
        yield _table(collection, drawn)
    for name in (name for name, of in tables.items() if of.table.sweep and of.table.tuned):
        yield Section("Tuning", f"sweep_{name}", (SWEEPS / f"{name}.md").read_text(encoding="utf-8"), SWEEPS)
    compared = {name: load_benchmark(name) for name in benchmark_names()}
    for name in compared:
        text = benchmark_page(name, benchmarks, f"python -m scripts.tables table={name}", kept=True)
        yield Section("Benchmarks", f"benchmark_{name}", text)
    for path in sorted(benchmarks.glob("*.md")):
        if path.stem not in {Path(table.records).stem for table in compared.values()}:
            yield Section("Benchmarks", f"record_{path.stem}", path.read_text(encoding="utf-8"), benchmarks)
    for name in tqdm(figure_names(), "drawing figures"):
        yield _figure(name, tables, benchmarks, drawn)
    shown = {name for of in tables.values() for name in of.table.published}
    shown |= {table.published for table in compared.values()}
    for name in names_in(PAPER):
        if name not in shown:
            yield _published(name)


def _table(collection: Collection, drawn: Path) -> Section:
    table, runs = collection.table, collection.all_runs
    kept = ROOT / "results" / "runs" in [root.resolve() for root in collection.roots]
    text = table_page(collection, build_table(collection), f"python -m scripts.tables table={table.name}", kept)
    pictures = _pictures(write_figures(collection, drawn))
    if pictures and table.setting is None and any(map(is_simulated, runs)):
        pictures += f"\n\nTime in the figure: predicted by the runtime model for a larger model, with {ASSUMED}"
    text = re.sub(r"(?m)^## ", lambda heading: f"{pictures}\n\n{heading[0]}", text, count=1)
    files = {run.folder: files_of(run.folder).items() for run in runs}
    links = [
        f"- {folder}: " + ", ".join(f"[{name}]({quote(str(path.resolve()))})" for name, path in of)
        for folder, of in files.items()
    ]
    text += "\n## Raw files\n\n" * bool(links) + "\n".join(links)
    return Section("Tables", table.name, text, state=f"{len(runs)} of {len(runs) + len(collection.missing)} runs")


def _figure(name: str, tables: dict[str, Collection], benchmarks: Path, drawn: Path) -> Section:
    figure = load_figure(name)
    try:
        drawing = figure.drawing(tables.__getitem__, benchmarks)
        picture, missing = _pictures(save(drawing.draw, drawn, f"figure_{name}")), drawing.missing
    except UsageError as error:  # its record has not been made
        picture, missing = "", [str(error)]
    return Section("Figures", f"figure_{name}", page(f"{figure.title} (figure)", "", picture, "", {"Missing": missing}))


def _published(name: str) -> Section:
    published = load_published(name)
    frame = published.frame().astype(object)
    texts = frame.where(frame.notna(), "unknown").map(lambda v: f"{v:g}" if isinstance(v, float) else str(v))
    columns = [f"`{key}` ({of.unit}): {of.definition}" for key, of in published.quantities.items()]
    parts = {"Columns": columns, "Published": published_lines([name])}
    text = page(published.title, "", markdown(texts, published.rows[0].labels), "", parts)
    return Section("Published alone", f"published_{name}", text)


def _pictures(files: Sequence[Path]) -> str:
    return "\n\n".join(f"![{file.stem}]({quote(str(file.resolve()))})" for file in files)


def render(sections: Sequence[Section], output: Path, about: str) -> str:
    """Return the HTML page that will be written to `output`; `about` says how it was made."""
    index, bodies = dict[str, list[str]](), []
    for section in sections:
        title = html.escape(section.text.partition("\n")[0].removeprefix("# "))
        state = f" ({section.state})" * bool(section.state)
        index.setdefault(section.group, []).append(f'<li><a href="#{section.name}">{title}</a>{state}</li>')
        bodies.append(f'<section id="{section.name}">\n{_section(section, output)}</section>')
    groups = [f"<h3>{group}</h3>\n<ul>\n{chr(10).join(lines)}\n</ul>" for group, lines in index.items()]
    head = f'<meta charset="utf-8">\n<title>Results</title>\n<style>{STYLE}</style>'
    texts = ["<h1>Results of both papers' tables and figures</h1>", f"<p>{html.escape(about)}</p>"]
    body = "\n".join([*texts, "<nav>", *groups, "</nav>", *bodies])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _section(section: Section, output: Path) -> str:
    """Return a section in HTML: pictures inside, links to what exists relative to the page, parts that unfold."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    above, *parts = re.split(r"(?m)^## ", section.text)
    made = parser.render(f"#{above}")  # a heading of the second level
    for part in parts:
        heading, _, text = part.partition("\n")
        opened = " open" * (heading == "Findings")
        made += f"<details{opened}><summary>{heading}</summary>\n{parser.render(text)}</details>\n"

    def link(match: re.Match[str]) -> str:
        path = section.folder / unquote(match[1])
        return f'<a href="{quote(os.path.relpath(path, output.parent))}">{match[2]}</a>' if path.exists() else match[2]

    def picture(match: re.Match[str]) -> str:
        content = base64.b64encode((section.folder / unquote(match[1])).read_bytes()).decode()
        return f'src="data:image/png;base64,{content}"'

    made = re.sub(r'(?s)<a href="(?![a-z]+:)([^"#]+)(?:#[^"]*)?">(.*?)</a>', link, made)
    return re.sub(r'src="([^"]+)"', picture, made)
