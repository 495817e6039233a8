"""What all figures share: colours, line styles, print sizes, axis labels, legends, and how files are written."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from common.experiments.table_file import Row

# Okabe and Ito's palette, then two of Tol's and grey, told apart by colour-blind readers; in print markers differ too.
FULL_COLOURS = (
    "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#888888",
)  # fmt: skip
TINTS = tuple(sns.blend_palette([colour, "white"], 3)[1] for colour in FULL_COLOURS[1:-1])  # without black and grey
COLOURS = FULL_COLOURS + TINTS
# A marker and a line style (on, off, ... in line widths) for each topology.
STYLES = {
    "o": "",
    "s": (4, 1.5),
    "^": (1, 1.2),
    "D": (5, 1.5, 1, 1.5),
    "v": (7, 2),
    "P": (2, 1),
    "X": (9, 2, 1, 2),
    "<": (3, 1, 1, 1, 1, 1),
    ">": (6, 1, 3, 1),
    "*": (1, 2.5),
}
METRIC_LABELS = {
    "accuracy": "validation accuracy (%)",
    "bleu": "validation sacreBLEU",
    "meteor": "validation METEOR (nltk)",
    "test_paper_bleu": "test BLEU (HF), %",
    "test_paper_meteor": "test METEOR (nltk)",
    "validation_loss": "validation loss",
    "validation_loss_smoothed": "validation loss, smoothed (nats)",
    "train_loss": "training loss",
}
RC = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.7,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "lines.markeredgewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 3.0,
    "svg.hashsalt": "report",  # the same data gives the same file
    "svg.fonttype": "none",
}
LEGEND_WIDTH = 130  # of both legends below the panels, in characters
FORMATS = ("png",)  # matplotlib can also write svg and pdf


def save(draw: Callable[[], Figure], folder: Path, name: str, formats: Collection[str] = FORMATS) -> list[Path]:
    """Draw in print style, write <folder>/<name> in these formats, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{form}" for form in formats]
    with mpl.rc_context({**sns.axes_style("whitegrid"), **RC}):
        figure = draw()
        for file in files:
            figure.savefig(file, dpi=200, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def label_of(metric: str) -> str:
    """Return the name of a metric's axis."""
    return METRIC_LABELS.get(metric, metric.replace("_", " "))


def seeds_of(counts: Iterable[int]) -> str:
    """Return the n of several means as text: 3, or 1-3 if they differ."""
    counts = sorted(counts) or [0]
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def line_names(rows: Sequence[Row]) -> list[str]:
    """Return the rows' methods, with labels where rows of the same method and topology differ in nothing else.

    A method's names have the labels in which any of its rows differ, on any topology.
    """
    names = []
    for row in rows:
        alike = [other for other in rows if (other.method, other.workers) == (row.method, row.workers)]
        told_apart = len({other.topology for other in alike}) == len(alike)
        differing = [key for key, value in row.labels.items() if any(other.labels[key] != value for other in alike)]
        labels = [] if told_apart else [f"{key.replace('_', ' ')} = {row.labels[key]}" for key in differing]
        names.append(", ".join([row.method, *labels]))
    return names


def looks(hue: Sequence[str], style: Sequence[str]) -> dict[str, Any]:
    """Return seaborn's arguments for lines with a colour for each hue, and dashes and a marker for each style."""
    return {
        "hue_order": hue,
        "palette": dict(zip(hue, cycle(COLOURS))),
        "style_order": style,
        "dashes": dict(zip(style, cycle(STYLES.values()))),
        "markers": dict(zip(style, cycle(STYLES))),
    }


def draw_lines(ax: Axes, data: pd.DataFrame, x: str, y: str, lines: Sequence[str], spread: bool) -> None:
    """Draw means of y that have no NaN, a line for each of `lines` in the column line; bars: lowest to highest."""
    bars = {"errorbar": ("pi", 100) if spread else None, "err_style": "bars"}
    bars["err_kws"] = {"elinewidth": 0.8, "capsize": 2}
    whole = data[y].notna().groupby([data["line"], data[x]]).transform("all")
    sns.lineplot(data[whole], x=x, y=y, hue="line", style="line", **looks(lines, lines), **bars, ax=ax)
    ax.get_legend().remove()


def scale_log(ax: Axes) -> None:
    """Make the horizontal axis logarithmic, with ticks at 1, 2 and 5 times powers of ten."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def draw_legends(figure: Figure, methods: Sequence[str], topologies: Sequence[str]) -> None:
    """Draw separate legends of methods (colours) and topologies (styles) below the panels; make room for long ones."""
    colours = [Line2D([], [], color=c, linewidth=2.2, label=name) for name, c in zip(methods, cycle(COLOURS))]
    styles = [
        Line2D([], [], color="0.35", linestyle=(0, dash) if dash else "-", marker=mark, label=name.replace("_", " "))
        for name, (mark, dash) in zip(topologies, cycle(STYLES.items()))
    ]
    beside = 2 if len(topologies) > 5 else 1
    room = LEGEND_WIDTH - beside * (7 + max(map(len, topologies)))  # the line next to a label counts as seven
    columns = max(1, min(len(methods) // 2, room // (7 + max(map(len, methods)))))
    rows = max(-(-len(methods) // columns), -(-len(topologies) // beside))
    figure.set_figheight(figure.get_figheight() + 0.16 * max(0, rows - 4))
    for handles, title, side, ncols in ((colours, "method", "left", columns), (styles, "topology", "right", beside)):
        figure.legend(handles=handles, title=title, loc=f"outside lower {side}", ncols=ncols, alignment="left")
