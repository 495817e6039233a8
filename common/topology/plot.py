"""A topology as a picture: one panel per round, workers on a circle in the order of hosts."""

import math
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Polygon, Wedge

from common.topology.round import Round
from common.topology.table import shown_rounds, structure, title
from common.topology.topology import Topology

MOST_PANELS = 24
PANEL_INCHES = 2.8
LIMIT = 1.35  # half the side of a panel; the workers lie on the unit circle
HOST_GAP = 0.8  # between two hosts on the circle, in units of the distance between workers
INK, MUTED = "#22303c", "#7a8793"
ACROSS, INSIDE, PLAIN = "#c8364f", "#5b6f82", "#2f5d80"  # edges between hosts, inside a host, if not `hosted`


def plot(topology: Topology, path: str | os.PathLike, rounds: int | None = None) -> None:
    """Draw the rounds (see `shown_rounds`; at most 24) into the file `path`; its suffix gives the format.

    Arrows point from giver to taker, lines without heads are mutual, groups of more than two that average are
    shaded, and hollow workers idle.

    Raises ValueError for a suffix that matplotlib does not know, OSError when the file cannot be written.
    """
    count = min(shown_rounds(topology, rounds), MOST_PANELS)
    columns = count if count <= 4 else 3 if count in (5, 6, 9) else 4
    lines = math.ceil(count / columns)
    circle = _Circle(topology.world_size, topology.workers_per_host)
    head, foot = 0.68, 0.4 if circle.hosted else 0.05  # inches
    width, height = max(columns, 2) * PANEL_INCHES, lines * (PANEL_INCHES + 0.25) + head + foot
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.suptitle(title(topology), color=INK, fontsize=12, fontweight="bold", y=1 - 0.18 / height)
    grid = figure.subplots(lines, columns, squeeze=False)
    top = 1 - head / height
    figure.subplots_adjust(left=0.01, right=0.99, bottom=foot / height, top=top, wspace=0.03, hspace=0.1)
    for t, axes in enumerate(grid.flat):
        axes.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT + 0.1, LIMIT + 0.1), aspect="equal")
        axes.axis("off")
        if t < count:
            _draw_round(axes, topology.round(t), t, circle)
    if circle.hosted:
        across = Line2D([], [], color=ACROSS, linewidth=2, label="between hosts")
        inside = Line2D([], [], color=INSIDE, linewidth=2, label="inside a host")
        figure.legend(handles=[across, inside], loc="lower center", ncols=2, frameon=False, labelcolor=INK)
    figure.savefig(path, dpi=160)


@dataclass(frozen=True)
class _Circle:
    """Where the workers lie: clockwise from the top, the workers of a host side by side."""

    world_size: int
    workers_per_host: int

    @cached_property
    def hosts(self) -> int:
        return -(-self.world_size // self.workers_per_host)

    @property
    def hosted(self) -> bool:
        """Whether there is anything to tell apart: several hosts, and several workers on one."""
        return self.workers_per_host > 1 and self.hosts > 1

    @cached_property
    def step(self) -> float:
        """The angle between two workers of one host, in radians."""
        return 2 * math.pi / (self.world_size + (HOST_GAP * self.hosts if self.hosted else 0))

    @cached_property
    def angles(self) -> np.ndarray:
        """Angles of the workers, float64 [n], counter-clockwise from the right as matplotlib has them."""
        workers = np.arange(self.world_size)
        gaps = HOST_GAP * (workers // self.workers_per_host) if self.hosted else 0
        return math.pi / 2 - self.step * (workers + gaps)

    @cached_property
    def points(self) -> np.ndarray:
        """Coordinates of the workers, float64 [n, 2]."""
        return np.stack([np.cos(self.angles), np.sin(self.angles)], axis=1)

    @cached_property
    def radius(self) -> float:
        """Radius of a worker's disc."""
        return min(0.14, 0.33 * self.step)

    def host(self, worker: int) -> int:
        return worker // self.workers_per_host

    def colour(self, worker: int) -> str:
        """Return the colour of a worker: its host's, where hosts differ."""
        if not self.hosted:
            return PLAIN
        if self.hosts <= 8:
            return to_hex(colormaps["Dark2"](self.host(worker)))
        return to_hex(colormaps["twilight_shifted"](0.1 + 0.8 * self.host(worker) / self.hosts))

    def edge_colour(self, i: int, j: int) -> str:
        if not self.hosted:
            return PLAIN
        return INSIDE if self.host(i) == self.host(j) else ACROSS


def _draw_round(axes: Axes, round_: Round, t: int, circle: _Circle) -> None:
    axes.text(0, LIMIT + 0.16, f"round {t}", ha="center", color=INK, fontsize=10.5, fontweight="bold")
    axes.text(0, LIMIT - 0.02, structure(round_).replace("<-", "←"), ha="center", color=MUTED, fontsize=9)
    if circle.hosted:
        _draw_hosts(axes, circle)
    for group in round_.groups or ():
        if len(group) > 2:  # points of a circle in the order of angles are the corners of their convex hull
            colour = circle.edge_colour(group[0], group[-1])
            axes.add_patch(Polygon(circle.points[list(group)], facecolor=colour, alpha=0.13, linewidth=0, zorder=1))
    _draw_edges(axes, round_, circle)
    for i, (x, y) in enumerate(circle.points):
        busy = bool(round_.in_peers(i) or round_.out_peers(i))
        colour = circle.colour(i)
        face, edge, text = (colour, colour, "white") if busy else ("white", MUTED, MUTED)
        axes.add_patch(Circle((x, y), circle.radius, facecolor=face, edgecolor=edge, linewidth=1, zorder=4))
        size = min(9.0, 68 * circle.radius)
        axes.text(x, y, str(i), ha="center", va="center_baseline", fontsize=size, color=text, zorder=5)


def _draw_hosts(axes: Axes, circle: _Circle) -> None:
    """Draw a band behind the workers of each host."""
    for host in range(circle.hosts):
        workers = range(host * circle.workers_per_host, min((host + 1) * circle.workers_per_host, circle.world_size))
        ends = circle.angles[workers[-1]] - 0.5 * circle.step, circle.angles[workers[0]] + 0.5 * circle.step
        half = 1.5 * circle.radius
        band = Wedge((0, 0), 1 + half, *np.degrees(ends), width=2 * half, color=circle.colour(workers[0]), alpha=0.16)
        band.set(linewidth=0, zorder=0)
        axes.add_patch(band)


def _draw_edges(axes: Axes, round_: Round, circle: _Circle) -> None:
    """Draw who takes from whom: mutual edges once and straight, directed ones as arrows bent inwards."""
    points_per_unit = 72 * PANEL_INCHES / (2 * LIMIT)
    shrink = points_per_unit * circle.radius
    degree = max(len(round_.in_peers(i)) for i in range(round_.world_size))
    width = 1.5 if degree <= 2 else 1.1 if degree <= 4 else 0.7
    for i in range(round_.world_size):
        for j in round_.in_peers(i):
            mutual = i in round_.in_peers(j)
            if mutual and i > j:
                continue
            source, target = circle.points[j], circle.points[i]
            colour = circle.edge_colour(i, j)
            arrow = FancyArrowPatch(source, target, color=colour, linewidth=width, zorder=2 if colour == INSIDE else 3)
            arrow.set_arrowstyle("-" if mutual else "-|>,head_length=4,head_width=1.8")
            arrow.set_connectionstyle("arc3", rad=0 if mutual else round(_bend(source, target), 3))
            arrow.shrinkA, arrow.shrinkB = shrink, shrink + (0 if mutual else 0.5)
            axes.add_patch(arrow)


def _bend(source: np.ndarray, target: np.ndarray) -> float:
    """Return the `rad` of an arc3 connection that passes nearer to the centre than the chord does."""
    (dx, dy), (x, y) = target - source, source + target
    rad = min(0.4, 0.25 / math.hypot(dx, dy))  # short arrows need more, to pass below the workers between
    return -math.copysign(rad, dy * x - dx * y)
