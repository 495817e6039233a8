"""Marks on learning curves where workers left or joined."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from common.report.collect import Collection

MARKS = {"left": "x", "joined": "+"}  # none that stands for a topology


def changes(collection: Collection) -> pd.DataFrame:
    """Return a line for each change of workers in any run: method, topology, step, kind ("left" or "joined")."""
    found = []
    for row in collection.table.rows:
        for run in collection.runs[row.name]:
            rows = run.metrics[run.metrics["split"] == "membership"]
            found += [
                {"method": row.method, "topology": row.topology, "step": change["step"], "kind": kind}
                for change in rows.to_dict("records")
                for kind in MARKS
                if change[kind]
            ]
    return pd.DataFrame(found, columns=["method", "topology", "step", "kind"]).drop_duplicates()


def mark_changes(ax: Axes, data: pd.DataFrame, found: pd.DataFrame, x: str) -> None:
    """Mark changes on the curves of a panel, which are means over seeds; a change of any seed is marked.

    data: what the curves were drawn from (`common.report.figures.curves`)
    x:    the column of the abscissa
    """
    for (method, topology, kind), steps in found.groupby(["method", "topology", "kind"])["step"]:
        curve = data[(data["method"] == method) & (data["topology"] == topology)].dropna(subset="value")
        means = curve.assign(at=curve["step"]).groupby("at")[[x, "value"]].mean()
        inside = steps[(steps >= means.index.min()) & (steps <= means.index.max())]
        where = {name: np.interp(inside, means.index, means[name]) for name in (x, "value")}
        ax.plot(where[x], where["value"], MARKS[kind], color="0.1", markersize=6, zorder=3)
    for kind in MARKS:
        if (found["kind"] == kind).any():
            ax.plot([], [], MARKS[kind], color="0.1", label=f"workers {kind}")
