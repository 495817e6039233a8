"""Curves against time: as in the paper's Figure 7, published above and ours below; and a panel for each variant."""

import pandas as pd
from matplotlib.figure import Figure

from common.report.collect import Collection
from common.report.drawing import draw_legends, label_of, recorded_as, seeds_of
from common.report.figure_files import Curves, Panels
from common.report.figures import curves, draw_panel, labels_of, time_label
from common.report.published import PublishedTable, load_published
from common.report.registry import Table


def of_figure(figure_file: Curves, collection: Collection) -> Collection:
    """Return the runs of the figure's rows and variant."""
    if figure_file.variant is not None:
        collection = dict(zip(collection.table.variants, collection.by_variant(), strict=True))[figure_file.variant]
    return collection.of_rows(figure_file.rows, figure_file.title)


def draw_time_curves(figure_file: Curves, collection: Collection) -> Figure:
    """Draw published curves and, if it has runs, those of a collection `of_figure`."""
    table, runs = collection.table, collection.all_runs
    heights = 1 + bool(runs)
    figure = Figure(figsize=(3.7 * len(figure_file.metrics), 0.9 + 2.5 * heights), layout="constrained")
    axes = figure.subplots(heights, len(figure_file.metrics), squeeze=False)
    paper = load_published(figure_file.published)
    published = _published(paper, table)
    for ax, metric in zip(axes[0], figure_file.metrics, strict=True):
        draw_panel(ax, table, published.assign(value=published[metric]), "time_ks")
        ax.set(xlabel="time (ks)", ylabel=paper.axes.get(metric, metric), title="published (digitised)")
        if metric == "bleu" and paper.reference_bleu is not None:
            ax.axhline(paper.reference_bleu, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)))
    for ax, metric in zip(axes[1] if runs else [], figure_file.metrics.values(), strict=False):
        draw_panel(ax, table, curves(collection, metric), "time_s")
        title = "ours, the proxy" if collection.table.proxy_of else "ours"
        ax.set(xlabel=time_label(runs, "s"), ylabel=label_of(metric), title=title)
    figure.suptitle(figure_file.title if runs else f"{figure_file.title} (no finished runs of ours)", fontsize=9)
    draw_legends(figure, *labels_of(table))
    return figure


def draw_panels(figure_file: Panels, collection: Collection) -> Figure:
    """Draw a metric against time, a panel for each variant of the figure; empty ones for variants without runs.

    A line is the mean over seeds, its band goes from the lowest to the highest seed.
    """
    table, metric = collection.table, figure_file.metric
    variants = dict(zip(table.variants, collection.by_variant(), strict=True))
    figure = Figure(figsize=(3.4 * len(figure_file.panels), 4.6), layout="constrained")
    axes = figure.subplots(1, len(figure_file.panels), sharey=True, squeeze=False)[0]
    seeds = set()
    for ax, (name, title) in zip(axes, figure_file.panels.items(), strict=True):
        of_variant = variants[name]
        draw_panel(ax, table, curves(of_variant, metric), "time_s")
        if table.target is not None and table.target.metric == recorded_as(metric)[1]:
            ax.axhline(table.target.value, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)))
        ax.set(xlabel=time_label(of_variant.all_runs, "s"), ylabel=label_of(metric), title=title)
        ax.set_xlim(left=0)
        ax.label_outer()
        seeds |= {len(runs) for runs in of_variant.runs.values() if runs}
    several = f"mean of {seeds_of(seeds)} seeds; band: lowest to highest"
    shown = {0: "no finished runs", 1: "one seed"}.get(max(seeds, default=0), several)
    figure.suptitle(f"{figure_file.title} ({shown})", fontsize=9)
    draw_legends(figure, *labels_of(table))
    return figure


def _published(paper: PublishedTable, table: Table) -> pd.DataFrame:
    """Return the published curves, with methods and topologies named as in our rows."""
    frame = paper.read_curves()
    rows = pd.DataFrame(
        [{"method": row.method.lower(), "topology": row.topology, "name": row.method} for row in table.rows]
    )
    merged = frame.merge(rows, on=["method", "topology"])
    return merged.assign(method=merged["name"], step=merged["epoch"])
