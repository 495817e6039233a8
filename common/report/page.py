"""One HTML page with all tables, figures and configurations, which opens from disk."""

import base64
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pandas as pd
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pandas.api.types import is_numeric_dtype
from tqdm import tqdm

from common.cli import UsageError
from common.experiments.collect import Collection, collect
from common.experiments.derived import ASSUMED, is_simulated
from common.experiments.runs import FinishedRun, files_of
from common.experiments.sweeps import SWEEPS, sweep_command
from common.experiments.tables import Table, load_table, table_names
from common.report.benchmark_tables import (
    LEFT,
    BenchmarkTable,
    benchmark_definitions,
    benchmark_names,
    benchmark_origin,
    build_benchmark,
    load_benchmark,
    missing_records,
    readable_benchmark,
)
from common.report.figures import drawing_of, figure_names, load_figure, write_figures
from common.report.origin import describe_commit, describe_hardware, describe_origin
from common.report.published import load_published, published_names
from common.report.records import read_record
from common.report.style import save
from common.report.sweep_files import LEFT as SWEEP_LEFT
from common.report.sweep_files import column_definitions, sweep_frame
from common.report.tables import (
    build_table,
    definitions,
    headings,
    left_of,
    missing_lines,
    published_lines,
    readable,
)

BADGES = {"proxy": "proxy", "paper": "at the paper's scale", "published": "published only"}

Item = TypeVar("Item")


@dataclass(frozen=True)
class Section:
    """A table or figure of the page.

    badge:      a key of BADGES
    group:      its heading in the index
    frame:      texts
    left:       its columns that are aligned to the left
    from_paper: its columns of published numbers
    """

    name: str
    title: str
    note: str = ""
    badge: str = ""
    group: str = "Tables"
    state: str = ""
    frame: pd.DataFrame | None = None
    left: Sequence[str] = ()
    from_paper: Sequence[str] = ()
    images: Sequence[str] = ()
    findings: Sequence[str] = ()
    definitions: Sequence[str] = ()
    published: Sequence[str] = ()
    origin: Sequence[str] = ()
    runs: Sequence[dict[str, Any]] = field(default=())
    missing: Sequence[str] = ()

    @property
    def badge_text(self) -> str:
        """The badge's text."""
        return BADGES[self.badge]


def sections_of(roots: Sequence[Path], benchmarks: Path, page: Path) -> list[Section]:
    """Return sections for tables of runs, benchmarks, figures, and published numbers that nothing here reproduces."""
    names = _told(table_names(), "reading tables")
    tables = {name: collect(load_table(name), *roots, allow_empty=True) for name in names}
    make = [partial(_table, collection, page) for collection in tables.values()]
    swept = [collection.table for collection in tables.values() if collection.table.sweep and collection.table.tuned]
    make += [partial(_sweep, table) for table in swept]
    compared = [load_benchmark(name) for name in benchmark_names()]
    make += [partial(_benchmark, table, benchmarks) for table in compared]
    records = {file.stem for file in benchmarks.glob("*.md") if file.with_suffix(".csv").exists()}
    records -= {Path(table.records).stem for table in compared}
    make += [partial(_record, benchmarks / name) for name in sorted(records)]
    make += [partial(_figure, name, tables, benchmarks) for name in figure_names()]
    shown = {name for collection in tables.values() for name in collection.table.published}
    shown |= {table.published for table in compared}
    make += [partial(_published, name) for name in published_names() if name not in shown]
    sections = [section() for section in _told(make, "drawing sections")]
    # Those with numbers of ours first.
    return sorted(sections, key=lambda section: section.state.startswith("0 of"))


def _told(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items and show progress: a bar in a terminal, a line for every tenth item in a pipe or file."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what)
        return
    for number, item in enumerate(items):
        if number % 10 == 0:
            print(f"{what}: {number} of {len(items)}", file=sys.stderr, flush=True)
        yield item


def render(sections: Sequence[Section], **about: str) -> str:
    """Return the page; `about` holds the date, commit and command that it shows."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups: dict[str, list[Section]] = {}
    for section in sections:
        groups.setdefault(section.group, []).append(section)
    return environment.get_template("page.html").render(sections=sections, groups=groups, zip=zip, **about)


def _table(collection: Collection, page: Path) -> Section:
    table, done = collection.table, len(collection.all_runs)
    at_scale, compared = bool(table.published) and not table.proxy_of, table.baseline is not None
    return Section(
        name=table.name,
        title=table.title,
        note=table.note,
        badge="paper" if at_scale else "proxy" if compared else "",
        state=f"{done} of {done + len(collection.missing)} runs",
        frame=readable(build_table(collection), table),
        left=left_of(table),
        from_paper=[name for name, (column, _) in headings(table).items() if column.statistic == "published"],
        images=_pictures(lambda folder: write_figures(collection, folder)),
        definitions=[*definitions(table), *_predicted(collection)],
        published=published_lines(table.published),
        origin=describe_origin(collection),
        runs=_runs(collection, page),
        missing=missing_lines(collection),
    )


def _predicted(collection: Collection) -> list[str]:
    """Return what the figure's time is, if it is predicted."""
    if collection.table.setting is not None or not any(map(is_simulated, collection.all_runs)):
        return []
    return [f"time in the figure: predicted by the runtime model for a larger model, with {ASSUMED}"]


def _sweep(table: Table) -> Section:
    """Return the section of a table's learning rates, from what its sweep left."""
    frame = sweep_frame(table, table.tuned.methods)
    return Section(
        name=f"sweep_{table.name}",
        title=f"Tuning of {table.name}",
        group="Tuning",
        frame=frame,
        left=SWEEP_LEFT,
        images=_pictures(lambda _: [SWEEPS / f"{table.name}.png"]),
        definitions=[f"`{name}`: {text}" for name, text in column_definitions(table).items() if name in frame],
        origin=[f"`results/sweeps/{table.name}.md` and `.csv`, with every trial", f"`{sweep_command(table.name)}`"],
    )


def _benchmark(table: BenchmarkTable, records: Path) -> Section:
    return Section(
        name=f"benchmark_{table.name}",
        title=table.title,
        group="Benchmarks",
        note=table.note,
        frame=readable_benchmark(table, build_benchmark(table, records)),
        left=LEFT,
        definitions=benchmark_definitions(table),
        published=published_lines([table.published]),
        origin=benchmark_origin(table, records),
        missing=missing_records(table, records),
    )


def _record(path: Path) -> Section:
    """Return the section of a benchmark without published numbers: <path>.csv and .md."""
    record, frame = read_record(path.with_suffix(".md")), pd.read_csv(path.with_suffix(".csv"))
    texts = [name for name in frame if not is_numeric_dtype(frame[name])]
    numbers = {name: frame[name].map(_short) for name in frame if name not in texts}
    return Section(
        name=f"record_{path.name}",
        title=f"Benchmark {path.name}: {record.title}",
        group="Benchmarks",
        frame=frame.fillna(dict.fromkeys(texts, "")).assign(**numbers),
        left=texts,
        from_paper=[name for name in frame if name.startswith("published")],
        findings=record.findings,
        definitions=record.definitions,
        origin=[f"`{path}.csv`", *record.origin],
    )


def _short(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def _figure(name: str, tables: dict[str, Collection], benchmarks: Path) -> Section:
    figure = load_figure(name)
    section = Section(name=f"figure_{name}", title=f"{figure.title} (figure)", group="Figures")
    try:
        drawing = drawing_of(figure, tables.__getitem__, benchmarks)
    except UsageError as error:  # its record has not been made
        return replace(section, missing=[str(error)])
    return replace(section, images=_pictures(lambda folder: save(drawing.draw, folder, name)), missing=drawing.missing)


def _published(name: str) -> Section:
    table = load_published(name)
    frame = table.frame().astype(object)
    texts = frame.where(frame.notna(), "unknown").map(lambda v: f"{v:g}" if isinstance(v, float) else str(v))
    return Section(
        name=f"published_{name}",
        title=table.title,
        badge="published",
        group="Published alone",
        frame=texts,
        left=tuple(table.rows[0].labels),
        definitions=[f"`{key}` ({quantity.unit}): {quantity.definition}" for key, quantity in table.quantities.items()],
        published=published_lines([name]),
    )


def _runs(collection: Collection, page: Path) -> list[dict[str, Any]]:
    """Return what the page shows of every run; the configuration only of each row's first run."""
    rows = []
    for name, runs in collection.runs.items():
        seen = set()
        for run in runs:
            variant = collection.variant_of[run.folder]
            first = variant not in seen
            seen.add(variant)
            label = " ".join(filter(None, [name, variant, f"seed {run.config.get('seed')}"]))
            rows.append(_run(run, label, page, first))
    return rows


def _run(run: FinishedRun, label: str, page: Path, with_config: bool) -> dict[str, Any]:
    files = {name: os.path.relpath(file, page.parent) for name, file in files_of(run.folder).items()}
    return {
        "label": label,
        "hardware": describe_hardware(run.environment),
        "commit": describe_commit(run.environment),
        "start": run.environment.get("start"),
        "command": run.environment.get("command"),
        "links": {name: quote(file) for name, file in files.items()},
        "config": yaml.safe_dump(run.config, sort_keys=False) if with_config else "",
    }


def _pictures(write: Any) -> list[str]:
    """Return data URIs of the pictures that `write(folder)` makes."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = [base64.b64encode(file.read_bytes()).decode() for file in write(Path(folder))]
        return [f"data:image/png;base64,{picture}" for picture in pictures]
