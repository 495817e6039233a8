"""Curves against time as in the paper's Figure 7: published above, ours below."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.report.collect import Collection
from common.report.drawing import draw_legends, label_of
from common.report.figure_files import Curves
from common.report.figures import curves, draw_panel, labels_of, time_label
from common.report.published import load_published
from common.report.registry import Table


def of_figure(figure_file: Curves, collection: Collection) -> Collection:
    """Return the runs of the figure's variant."""
    if figure_file.variant is None:
        return collection
    return dict(zip(collection.table.variants, collection.by_variant(), strict=True))[figure_file.variant]


def draw_time_curves(figure_file: Curves, collection: Collection) -> Figure:
    """Draw published curves and those of a collection of the figure's table and variant, if that has runs."""
    rows = figure_file.rows
    kept = tuple(row for row in collection.table.rows if row.name in rows)
    table = collection.table.model_copy(update={"rows": kept})
    runs = [run for row in rows for run in collection.runs[row]]
    heights = 1 + bool(runs)
    figure = Figure(figsize=(3.7 * len(figure_file.metrics), 0.9 + 2.5 * heights), layout="constrained")
    axes = figure.subplots(heights, len(figure_file.metrics), squeeze=False)
    published = _published(figure_file, table)
    reference = load_published(figure_file.published).reference_bleu
    for ax, metric in zip(axes[0], figure_file.metrics, strict=True):
        _panel(ax, table, published.assign(value=published[metric]), "time_ks", metric, "published (digitised)")
        ax.set_xlabel("time (ks)")
        if metric == "bleu" and reference is not None:
            ax.axhline(reference, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)))
    for ax, metric in zip(axes[1] if runs else [], figure_file.metrics, strict=False):
        data = curves(collection, metric, rows)
        _panel(ax, table, data, "time_s", metric, "ours, the proxy" if collection.table.proxy_of else "ours")
        ax.set_xlabel(time_label(runs, "s"))
    figure.suptitle(figure_file.title if runs else f"{figure_file.title} (no finished runs of ours)", fontsize=9)
    draw_legends(figure, *labels_of(table))
    return figure


def _published(figure_file: Curves, table: Table) -> pd.DataFrame:
    """Return the published curves, with methods and topologies named as in our rows."""
    frame = load_published(figure_file.published).read_curves()
    rows = pd.DataFrame(
        [{"method": row.method.lower(), "topology": row.topology, "name": row.method} for row in table.rows]
    )
    merged = frame.merge(rows, on=["method", "topology"])
    return merged.assign(method=merged["name"], step=merged["epoch"])


def _panel(ax: Axes, table: Table, data: pd.DataFrame, x: str, metric: str, title: str) -> None:
    draw_panel(ax, table, data, x)
    ax.set(ylabel=label_of(metric), title=title)
