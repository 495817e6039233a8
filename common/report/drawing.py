"""What all figures share: colours, line styles, print sizes, axes' names, and how files are written."""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common.report.table_file import Row

# Okabe and Ito's palette, then two of Tol's and grey, told apart by colour-blind readers; in print markers differ too.
FULL_COLOURS = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#999933",
    "#888888",
)
TINTS = tuple(sns.blend_palette([colour, "white"], 3)[1] for colour in FULL_COLOURS[1:-1])  # without black and grey
COLOURS = FULL_COLOURS + TINTS
# A line style (on, off, ... in line widths) and a marker for each topology.
STYLES = (
    ("", "o"),
    ((4, 1.5), "s"),
    ((1, 1.2), "^"),
    ((5, 1.5, 1, 1.5), "D"),
    ((7, 2), "v"),
    ((2, 1), "P"),
    ((9, 2, 1, 2), "X"),
    ((3, 1, 1, 1, 1, 1), "<"),
    ((6, 1, 3, 1), ">"),
    ((1, 2.5), "*"),
)
MARKERS_PER_CURVE = 8
LARGEST_SVG_BYTES = 1_000_000

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
# (split, name) in a run; scores of the split "test" are not recorded in training, but by transformer.evaluate
RECORDED_AS = {
    "validation_loss": ("validation", "loss"),
    "validation_loss_smoothed": ("validation", "loss_smoothed"),
    "train_loss": ("train", "loss"),
    "test_paper_bleu": ("test", "paper_bleu"),
    "test_paper_meteor": ("test", "paper_meteor"),
}

RC = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.7,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 3.0,
    "svg.hashsalt": "report",  # the same data gives the same file
    "svg.fonttype": "none",
}


CURVES_WIDTH = 9.6  # of the figures with learning curves, in inches
LEGEND_WIDTH = 130  # of both legends below the panels, in characters
LINE_HEIGHT = 0.16  # of a legend, in inches
LEGEND_ROWS = 5  # of methods; if these do not suffice, topologies take several rows too


def recorded_as(metric: str) -> tuple[str, str]:
    """Return the split and the name under which a run records a metric."""
    return RECORDED_AS.get(metric, ("validation", metric))


def label_of(metric: str) -> str:
    """Return the name of a metric's axis."""
    return METRIC_LABELS.get(metric, metric.replace("_", " "))


def seeds_of(counts: Iterable[int]) -> str:
    """Return the n of several means as text: 3, or 1-3 where they differ."""
    counts = sorted(counts) or [0]
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def save(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """Draw in print style, write <folder>/<name>.png, and .svg unless it is large, and return the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**sns.axes_style("whitegrid"), **RC}):
        figure = draw()
        png = folder / f"{name}.png"
        figure.savefig(png, dpi=200)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    svg_path = folder / f"{name}.svg"
    if svg.tell() > LARGEST_SVG_BYTES:
        svg_path.unlink(missing_ok=True)  # an older one would show other data than the PNG
        return [png]
    svg_path.write_bytes(svg.getvalue())
    return [png, svg_path]


def line_names(rows: Sequence[Row]) -> list[str]:
    """Return the rows' methods, with their labels where rows of one method and topology differ in nothing else.

    A method's names have the labels in which any of its rows differ, on whatever topology.
    """
    names = []
    for row in rows:
        alike = [other for other in rows if (other.method, other.workers) == (row.method, row.workers)]
        told_apart = len({other.topology for other in alike}) == len(alike)
        differing = [key for key, value in row.labels.items() if any(other.labels[key] != value for other in alike)]
        labels = [] if told_apart else [f"{key.replace('_', ' ')} = {row.labels[key]}" for key in differing]
        names.append(", ".join([row.method, *labels]))
    return names


def draw_legends(figure: Figure, methods: list[str], topologies: list[str]) -> None:
    """Draw separate legends of methods (colours) and topologies (styles) below the panels."""
    colours = [
        Line2D([], [], color=colour, linewidth=2.2, label=method)
        for method, colour in zip(methods, COLOURS, strict=False)
    ]
    styles = [
        Line2D([], [], linestyle=(0, dash) if dash else "-", marker=marker, label=topology.replace("_", " "))
        for topology, (dash, marker) in zip(topologies, STYLES, strict=False)
    ]
    for line in styles:
        line.set(color="0.35", markersize=4.5)
    rows, rows_beside = legend_rows(methods, topologies)
    for handles, title, side, height in ((colours, "method", "left", rows), (styles, "topology", "right", rows_beside)):
        columns = -(-len(handles) // max(height, 1))
        figure.legend(handles=handles, title=title, loc=f"outside lower {side}", ncols=columns, alignment="left")


def legend_rows(methods: list[str], topologies: list[str]) -> tuple[int, int]:
    """Return how many rows the legends of methods and topologies have beside each other."""
    for beside in range(1, len(topologies) + 1):
        room = LEGEND_WIDTH - legend_width(topologies, beside)
        rows = next((rows for rows in range(1, len(methods)) if legend_width(methods, rows) <= room), len(methods))
        if rows <= LEGEND_ROWS:
            return rows, beside
    return len(methods), 1


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns of a legend fit into this width in inches."""
    room = width * LEGEND_WIDTH / CURVES_WIDTH
    fitting = [columns for columns in (3, 2) if legend_width(labels, -(-len(labels) // columns)) <= room]
    return max(fitting, default=1)


def legend_width(labels: Sequence[str], rows: int) -> int:
    """Return the width in characters of a legend with this number of rows; the line beside a label counts as seven."""
    return sum(7 + max(map(len, labels[first : first + rows])) for first in range(0, len(labels), rows))
