"""Bar charts as in the paper's Figure 6: a panel for each cluster, published and ours, and a bar for each method."""

from math import ceil

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.report.drawing import COLOURS
from common.report.figure_files import Bars

PANELS_PER_ROW = 3
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")


def draw_bars(figure_file: Bars, frame: pd.DataFrame) -> Figure:
    """Draw the bars of a frame with source, cluster, workers, method and the value, as `build_benchmark` returns it."""
    frame = frame.dropna(subset=[figure_file.value]).astype({figure_file.value: float, "workers": int})
    bars = list(dict.fromkeys(frame["method"]))
    panels = list(frame.groupby(["source", "cluster"], sort=False))
    rows = ceil(len(panels) / PANELS_PER_ROW)
    figure = Figure(figsize=(10.2, 0.6 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, min(PANELS_PER_ROW, len(panels)), squeeze=False).ravel()
    for ax, ((source, cluster), data) in zip(axes, panels, strict=False):
        _draw_panel(ax, data, figure_file.value, bars)
        ax.set(title=f"{source}: {cluster}", xlabel="workers", ylabel=figure_file.axis)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles, labels = max((ax.get_legend_handles_labels() for ax in axes), key=lambda pair: len(pair[0]))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(figure_file.title, fontsize=9)
    return figure


def _draw_panel(ax: Axes, data: pd.DataFrame, value: str, bars: list[str]) -> None:
    sns.barplot(
        data=data,
        x="workers",
        y=value,
        hue="method",
        hue_order=bars,
        palette=dict(zip(bars, COLOURS, strict=False)),
        saturation=1,
        width=0.86,
        edgecolor="white",
        linewidth=0.4,
        legend="full",
        errorbar=None,
        ax=ax,
    )
    for container, hatch in zip(ax.containers, HATCHES, strict=False):
        for patch in container:
            patch.set_hatch(hatch)
        heights = [f"{height:.1f}" if np.isfinite(height) else "" for height in container.datavalues]
        ax.bar_label(container, heights, fontsize=5.5, padding=1)
    ax.get_legend().remove()
    ax.grid(visible=False, axis="x")
    sns.despine(ax=ax)
