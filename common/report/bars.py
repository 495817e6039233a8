"""Bar charts: a panel for each case, and in it a group of bars at each place."""

from itertools import cycle

import pandas as pd
from matplotlib.figure import Figure

from common.report.style import COLOURS

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
WIDTH = 0.86  # of a group


def draw_bars(frame: pd.DataFrame, ylabel: str, columns: int, mark: str = "") -> Figure:
    """Draw a frame with the columns panel, group, bar and height, and with `mark`, a height to mark on each bar.

    Bars have their heights as numbers above them, or marks. `columns` panels are beside each other.
    """
    panels, bars = list(frame.groupby("panel", sort=False)), list(dict.fromkeys(frame["bar"]))
    rows, width = -(-len(panels) // columns), WIDTH / len(bars)
    figure = Figure(figsize=(10.2, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    colours, hatches = (COLOURS[1:], ("",)) if mark else (COLOURS, HATCHES)  # marks are black
    for ax, (title, data) in zip(axes, panels, strict=False):
        groups = list(dict.fromkeys(data["group"]))
        for number, (name, colour, hatch) in enumerate(zip(bars, cycle(colours), cycle(hatches), strict=False)):
            of = data[data["bar"] == name]
            places = [groups.index(group) + (number - (len(bars) - 1) / 2) * width for group in of["group"]]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            drawn = ax.bar(places, of["height"], width, label=name, **look)
            if mark:
                ax.plot(places, of[mark], "_", color="black", markersize=9, markeredgewidth=1.5, label=mark)
            else:
                ax.bar_label(drawn, fmt="%.1f", fontsize=5.5, padding=1)
        ax.set_xticks(range(len(groups)), groups, fontsize=6.5 if mark else None)
        ax.grid(visible=False, axis="x")
        ax.set(title=title, ylabel=ylabel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure
