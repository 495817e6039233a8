"""Figures of tables, and figures that results/definitions/figures/<name>.yaml defines."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Collection as Some
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from omegaconf import OmegaConf
from pydantic import Field, model_validator

from common.cli import UsageError, nearest
from common.experiments.collect import Collection
from common.experiments.definitions import ROOT, Definition, explained, meaning, read_definition
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import FinishedRun
from common.report.benchmark_tables import build_benchmark, load_benchmark, missing_records
from common.report.curves import draw_below_published, draw_table
from common.report.style import COLOURS, FORMATS, draw_lines, label_of, save, scale_log, seeds_of
from common.report.tables import missing_summary

FIGURES = ROOT / "results" / "definitions" / "figures"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
DODGE = 0.06  # between lines, in powers of two of the setting; on a linear axis in distances between settings
TIME = "s, simulated steps x measured time of a step"
LABELS = {
    "workers.count": "workers",
    "training.batch_size": "batch of all workers together",
    "optimizer.accumulation_steps": "accumulation steps",
}


class Drawing(NamedTuple):
    """A figure that can be drawn.

    draw:    returns the figure
    missing: a line for each run or record that the figure should show and does not
    """

    draw: Callable[[], Figure]
    missing: Sequence[str] = ()


CollectionOf = Callable[[str], Collection]  # returns a table's runs, by the table's name


class Bars(Definition):
    """A value of a benchmark's table: a panel for each cluster, published and ours, a bar for each method."""

    kind: Literal["bars"]
    title: str
    table: str
    value: str
    axis: str

    def drawing(self, _: CollectionOf, benchmarks: Path) -> Drawing:
        """Return the drawing of a benchmark's table."""
        table = load_benchmark(self.table)
        frame = build_benchmark(table, benchmarks).dropna(subset=[self.value])
        panel, heights = frame["source"] + ": " + frame["cluster"], frame[self.value].astype(float)
        workers = frame["workers"].astype(int).astype(str) + " workers"
        frame = frame.assign(panel=panel, group=workers, bar=frame["method"], height=heights)
        return Drawing(partial(draw_bars, frame, self.title, self.axis), missing_records(table, benchmarks))


class Curves(Definition):
    """Learning curves of a table's runs.

    rows:      the rows to draw, all that are named (default: as `draw_table` chooses)
    variant:   the variant to draw
    published: a file of results/paper whose curves are drawn above ours
    metrics:   {metric of the published curves: the metric of ours that is drawn below it}
    """

    kind: Literal["curves"]
    title: str
    table: str
    rows: tuple[str, ...] = ()
    variant: str | None = None
    published: str | None = None
    metrics: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _check(self) -> "Curves":
        if bool(self.published) != bool(self.metrics):
            raise ValueError("expected published with metrics, and only with them")
        return self

    def drawing(self, collection_of: CollectionOf, _: Path) -> Drawing:
        """Return the drawing of the table's runs."""
        collection = collection_of(self.table)
        if self.variant is not None:
            collection = collection.of_variant(self.variant)
        collection = of_rows(collection, self.rows or [row.name for row in collection.table.rows], self.title)
        if self.published:
            draw = partial(draw_below_published, collection, self.published, self.metrics)
        else:
            draw = partial(draw_table, collection, every=bool(self.rows))
        return Drawing(draw, missing_summary(collection))


class Times(Definition):
    """Time to a table's target, or final metric against time: simulated steps x time of a step in step_times.csv.

    also: {row: other methods of step_times.csv that make the same steps}
    """

    kind: Literal["times"]
    title: str
    table: str
    model: str
    also: dict[str, tuple[str, ...]] = Field({})

    def drawing(self, collection_of: CollectionOf, benchmarks: Path) -> Drawing:
        """Return the drawing of the table's runs; raise UsageError if no step of the model was measured."""
        collection, file = collection_of(self.table), benchmarks / "step_times.csv"
        if not file.is_file():
            raise UsageError(f"benchmarks={benchmarks}: expected step_times.csv in there")
        measured = pd.read_csv(file)
        if self.model not in set(measured["model"]):
            raise UsageError(f"model={self.model}: {nearest(self.model, set(measured['model']))}")
        of_rows(collection, [*self.also], self.title)  # all are known
        runs = timed(collection, measured[measured["model"] == self.model], self.also)
        if runs.empty:
            raise UsageError(f"table={self.table}: no finished run of a method whose step was measured")
        draw = partial(draw_final, runs, collection.table.metric, self.title)
        if collection.table.target:
            draw = partial(draw_times, times_to_target(runs), self.title)
        return Drawing(draw, missing_summary(collection))


FigureFile = Bars | Curves | Times
KINDS = {"bars": Bars, "curves": Curves, "times": Times}


def load_figure(name: str, folder: Path = FIGURES) -> FigureFile:
    """Read a figure's file; raises UsageError naming file, key, value and expectation if it is unknown or wrong."""
    content = read_definition(folder, name, key="figure")
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{name}.yaml: kind={kind}: {nearest(str(kind), KINDS)}")
    with explained(folder, name, KINDS[kind]):
        return KINDS[kind].model_validate(content)


def of_rows(collection: Collection, rows: Sequence[str], title: str) -> Collection:
    """Return the collection of these rows alone; raise UsageError naming the first unknown row."""
    known = [row.name for row in collection.table.rows]
    for row in rows:
        if row not in known:
            raise UsageError(f"rows={row}: unknown; {nearest(row, known)}")
    return collection.of_rows(rows, title)


def write_figures(
    collection: Collection, folder: Path, formats: Some[str] = FORMATS, every: bool = False
) -> list[Path]:
    """Write <folder>/<table>[_<variant>] in these formats for variants with runs; return the paths.

    A table over a setting is one picture with all its variants. Learning curves show `every` row if asked to.
    """
    parts, draw = [collection], draw_over_setting
    if collection.table.setting is None:
        parts = [collection.of_variant(name) for name in collection.table.variants] or parts
        draw = partial(draw_table, every=every)
    drawn = {part.table.name: partial(draw, part) for part in parts if part.all_runs}
    return [file for name, draw in drawn.items() for file in save(draw, folder, name, formats)]


def draw_over_setting(collection: Collection) -> Figure:
    """Draw the final metric against the table's setting, a line for each method, topology and variant that shares it.

    A tuned table has a second panel with the learning rates that its sweep chose, the same for all seeds. Lines are
    shifted sideways, so that their bars do not hide one another. The axis is logarithmic if all values are positive.
    """
    table = collection.table
    names = [table.metric, *(["learning_rate"] if table.sweep else [])]
    apart = not any(table.setting in meaning(overrides) for overrides in table.variants.values())
    line_of = {
        (row.name, variant): ", ".join(filter(None, [row.method, row.topology.replace("_", " "), variant]))
        for row in table.rows
        for variant in (apart and [*table.variants]) or [None]
    }
    lines = list(dict.fromkeys(line_of.values()))
    data = pd.DataFrame(
        {"setting": _number(run, table.setting), "line": line} | {name: QUANTITIES[name].of(run) for name in names}
        for place, line in line_of.items()
        for run in collection.of(*place)
    )
    places = dict(zip(lines, DODGE * (np.arange(len(lines)) - (len(lines) - 1) / 2), strict=True))
    settings = sorted(set(data["setting"]))
    scale, unit = (np.log2, 1) if settings[0] > 0 else (np.asarray, np.ptp(settings) / max(1, len(settings) - 1))
    data["x"] = scale(data["setting"]) + unit * data["line"].map(places)
    figure = Figure(figsize=(4.2 + 3.0 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        draw_lines(ax, data, "x", name, lines, spread=name != "learning_rate")
        ax.set_xticks(scale(settings), [f"{value:g}" for value in settings])
        ax.grid(visible=False, axis="x")
        ax.set(xlabel=LABELS.get(table.setting, table.setting), ylabel=label_of(name))
    for ax in axes[1:]:  # learning rates
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    seeds = seeds_of(collection.frame.groupby("row")["seed"].nunique())
    figure.suptitle(f"{table.title} (mean of {seeds} seeds; bars: lowest to highest)")
    return figure


def _number(run: FinishedRun, key: str) -> float:
    value = OmegaConf.select(OmegaConf.create(run.config), key)
    if not isinstance(value, int | float):
        raise UsageError(f"over={key}: {value!r} in {run.folder}: expected a number")
    return float(value)


def draw_bars(frame: pd.DataFrame, title: str, ylabel: str) -> Figure:
    """Draw a frame with the columns panel, group, bar and height; numbers above the bars are their heights."""
    panels, bars = list(frame.groupby("panel", sort=False)), list(dict.fromkeys(frame["bar"]))
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(10.2, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for ax, (panel, data) in zip(axes, panels, strict=False):
        look = {"hue_order": bars, "palette": COLOURS[: len(bars)], "saturation": 1, "linewidth": 0.4}
        sns.barplot(data, x="group", y="height", hue="bar", **look, edgecolor="white", ax=ax)
        for drawn, hatch in zip(ax.containers, cycle(HATCHES)):
            for bar in drawn:
                bar.set_hatch(hatch)
            ax.bar_label(drawn, fmt="%.1f", fontsize=5.5, padding=1)
        ax.get_legend().remove()
        ax.grid(visible=False, axis="x")
        ax.set(title=panel, xlabel="", ylabel=ylabel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4))
    figure.suptitle(title)
    return figure


def timed(collection: Collection, measured: pd.DataFrame, also: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Return a line for each run and network, with the run's quantities and the time of its step.

    `measured` has columns method, topology, mbit_per_s and step_ms, `also` other methods of a row in there.
    """
    rows = [
        (row.name, method, row.topology, f"{method}, {row.topology.replace('_', ' ')}")
        for row in collection.table.rows
        for method in (row.method, *also.get(row.name, ()))
    ]
    runs = pd.DataFrame(rows, columns=["row", "method", "topology", "line"]).merge(collection.frame, on="row")
    return runs.merge(measured, on=["method", "topology"])


def times_to_target(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each line and network of `timed` runs: seconds of the median, lowest and highest seed.

    A seed that does not arrive counts as the slowest; `lowest` and `highest` cover only the `arrived` of `seeds`.
    """
    seconds = runs["steps_to_target"].astype(float) * runs["step_ms"] / 1000
    by = [runs[name] for name in ("row", "line", "method", "mbit_per_s")]
    grouped, arrived = (s.groupby(by, sort=False) for s in (seconds, seconds[np.isfinite(seconds)]))
    parts = {"median": grouped.median(), "lowest": arrived.min(), "highest": arrived.max()}
    times = pd.DataFrame(parts | {"seeds": grouped.size(), "arrived": arrived.size()})
    return times.fillna({"arrived": 0}).astype({"arrived": int}).reset_index()


def draw_times(times: pd.DataFrame, title: str) -> Figure:
    """Draw the lines of `times_to_target` as dots with bars: a panel for each network, its fastest row on top."""
    panels = list(times.groupby("mbit_per_s"))
    colours = dict(zip(dict.fromkeys(times["method"]), cycle(COLOURS)))
    figure = Figure(figsize=(7.2, 0.9 + sum(0.35 + 0.27 * len(panel) for _, panel in panels)), layout="constrained")
    ratios = {"height_ratios": [len(panel) + 0.5 for _, panel in panels]}
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for ax, (rate, panel) in zip(axes, panels, strict=True):
        panel = panel.sort_values("median", kind="stable")
        for place, row in enumerate(panel.itertuples()):
            look = {"color": colours[row.method], "va": "center", "fontsize": 7}
            look["bbox"] = {"color": "white", "pad": 0.5}  # hides the grid
            note = "" if row.arrived == row.seeds else f"{row.arrived} of {row.seeds} seeds"
            if np.isfinite(row.median):
                ax.plot([row.lowest, row.highest], [place, place], color=colours[row.method], linewidth=1.2)
                ax.plot(row.median, place, "o", color=colours[row.method], markersize=6)
                ax.annotate(note, (row.highest, place), (5, 0), textcoords="offset points", **look)
            else:
                ax.text(0.01, place, note, transform=ax.get_yaxis_transform(), **look)
        ax.set(title=f"{rate:g} Mbit/s", yticks=range(len(panel)), ylim=(len(panel) - 0.5, -0.5))
        ax.set_yticklabels(panel["line"])
    axes[-1].set(xlabel=TIME, xlim=(0, None))
    figure.suptitle(f"{title}\n(dot: median seed; bar: lowest to highest that arrives)")
    return figure


def draw_final(runs: pd.DataFrame, metric: str, title: str) -> Figure:
    """Draw the final metric of `timed` runs against the time of their steps: a panel for each network."""
    seconds = [run.total("steps") for run in runs["run"]] * runs["step_ms"] / 1000
    runs = runs.assign(seconds=seconds, **{metric: runs[metric].astype(float)})
    panels = list(runs.groupby("mbit_per_s"))
    figure = Figure(figsize=(0.4 + 3.6 * len(panels), 3.7), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (rate, panel) in zip(axes, panels, strict=True):
        draw_lines(ax, panel, "seconds", metric, list(dict.fromkeys(runs["line"])), spread=True)
        scale_log(ax)
        ax.set(title=f"{rate:g} Mbit/s", xlabel=TIME, ylabel=label_of(metric))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    seeds = seeds_of(runs.groupby(["line", "variant"], dropna=False)["seed"].nunique())
    figure.suptitle(f"{title} (mean of {seeds} seeds; bars: lowest to highest)")
    return figure
