"""Tables of finished runs as data: rows, what each run measured, its curves, and the trials behind tuned values."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from common.config.base import is_bookkeeping
from common.experiments.collect import Collection
from common.experiments.derived import is_simulated, seconds_until
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import FinishedRun, RunError
from common.experiments.sweeps import SWEEPS
from common.experiments.table_file import Row
from common.experiments.tables import Table
from common.report.curves import recorded_as
from common.report.origin import describe_commit
from common.report.style import line_names

DIGITS = 6
MOST_POINTS = 40  # of a curve; a longer one is averaged over equally many neighbours


def short(value: object) -> object:
    """Return a number with six digits: "nan" or "inf" as text, None where there is none; other objects unchanged."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    number = float(f"{number:.{DIGITS}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def shorts(values: Iterable[object]) -> list[object]:
    """Return `short` of each value."""
    return [short(value) for value in values]


def number(text: str) -> float | None:
    """Return a text as a number, None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


def thin(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve of at most `most` points: means of equally many neighbours, each at the last of their steps.

    A row of the training split is itself a mean over the steps since the previous row, and stays one.
    """
    size = -(-len(steps) // most)
    if size == 1:
        return steps, values
    ends = np.arange(len(steps) % size or size, len(steps) + 1, size)  # the first point may have fewer
    return steps[ends - 1], np.array([part.mean() for part in np.split(values, ends[:-1])])


def line_of(steps: Sequence[float], values: np.ndarray) -> object:
    """Return the slope if values are proportional to steps, as bytes and predicted times mostly are, else values."""
    steps = np.asarray(steps, float)
    slope = values[-1] / steps[-1] if len(steps) else 0.0
    return short(slope) if np.allclose(values, slope * steps, rtol=1e-5, atol=0) else shorts(values)


class Pool:
    """Objects that many runs share, each kept once."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, item: Any) -> int:
        """Return the place of an equal object; add the item if there is none."""
        key = json.dumps(item, sort_keys=True)
        if key not in self._places:
            self._places[key] = len(self.kept)
            self.kept.append(item)
        return self._places[key]


# Shown for every run, in addition to its table's quantities.
ALSO = ("learning_rate", "consensus_distance", "half_life_second", "local_over_noise", "bytes_per_step")
CURVES = {  # with their names on the page
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "accuracy": "validation accuracy (%)",
    "bleu": "validation BLEU",
    "consensus_distance": "consensus distance",
}
# Keys that tell methods apart, rather than hyperparameters that two methods may share.
OF_METHODS = re.compile(r"optimizer\.(name|accumulation_steps|fused|momentum_mixing)")
HYPERPARAMETERS = ("optimizer", "schedule", "training", "data", "model")


class Records:
    """The tables' data, and the arrays and commits that they share."""

    def __init__(self) -> None:
        self.grids, self.commits = Pool(), Pool()

    def table(self, collection: Collection) -> dict[str, Any]:
        """Return what the page shows of a table's finished runs."""
        table = collection.table
        names = [*dict.fromkeys([*sorted(quantity.name for quantity in table.quantities), *ALSO])]
        variants = list(table.variants) or [None]
        lines = collection.frame[["row", "variant", "seed", "run"]].itertuples(index=False, name=None)
        rows = [row.name for row in table.rows]
        runs = [
            self.run(run, names) | {"row": rows.index(row), "variant": variants.index(variant), "seed": seed}
            for row, variant, seed, run in lines
        ]
        data = {
            "title": table.title,
            "metric": table.metric,
            "labels": table.labels,
            "variants": [variant or "" for variant in variants],
            "quantities": names,
            "rows": [
                _row(collection, row, name, variants)
                for row, name in zip(table.rows, names_of(table.rows), strict=True)
            ],
            "runs": runs,
            "missing": len(collection.missing),
        }
        return only_differing(data)

    def run(self, run: FinishedRun, names: Sequence[str]) -> dict[str, Any]:
        """Return a run's quantities, curves and commit; `measured` says whether its times are measured or predicted."""
        places: dict[bytes, int] = {}  # of abscissas, by their steps, which most curves of a run share
        return {
            "values": shorts(QUANTITIES[name].number_of(run) for name in names),
            "curves": {name: curve for name in CURVES if (curve := self._curve(run, name, places))},
            "commit": self.commits.add(describe_commit(run.environment)),
            "measured": not is_simulated(run),
        }

    def _curve(self, run: FinishedRun, name: str, places: dict[bytes, int]) -> list[Any] | None:
        """Return [place of the abscissas, values], None if the run recorded no such metric."""
        split, metric = recorded_as(name)
        try:
            frame = run.curve(split, metric).dropna(subset="step")
            steps, values = thin(frame["step"].to_numpy(), frame[metric].to_numpy(float))
        except RunError:
            return None
        key = steps.tobytes()
        if key not in places:
            places[key] = self.grids.add(_grid(run, steps))
        return [places[key], shorts(values)]


def _grid(run: FinishedRun, steps: np.ndarray) -> dict[str, Any]:
    """Return a curve's abscissas: steps, and samples, MB sent by a worker and seconds as arrays or per step."""
    training = run.config.get("training", {})
    found: dict[str, Any] = {"steps": shorts(steps)}
    if training.get("batch_size"):
        found["samples"] = training["batch_size"] * run.config.get("model", {}).get("context", 1)
    try:
        sent = run.curve("train", "bytes_sent").dropna()
        megabytes = sent["bytes_sent"] / run.total("workers") / 1e6
        found["megabytes"] = line_of(steps, np.interp(steps, [0, *sent["step"]], [0, *megabytes]))
        found["seconds"] = line_of(steps, seconds_until(run, pd.Series(steps)))
    except RunError:
        pass  # the page leaves out abscissas that a run lacks
    return found


def is_allreduce(run: FinishedRun) -> bool:
    """Return whether all workers of a run average their gradients."""
    return run.config.get("parallel", {}).get("method") == "allreduce"


def names_of(rows: Sequence[Row]) -> list[str]:
    """Return a name for each row that no other row of the table has: method, labels, topology and workers."""
    several = len({row.workers for row in rows}) > 1
    return [
        f"{name}, {row.topology}" + (f", {row.workers} workers" if several else "")
        for row, name in zip(rows, line_names(rows), strict=True)
    ]


def _row(collection: Collection, row: Row, name: str, variants: Sequence[str | None]) -> dict[str, Any]:
    table, runs = collection.table, collection.of(row.name)
    return {
        "id": row.name,
        "name": name,
        "method": row.method,
        "topology": row.topology,
        "workers": int(runs[0].total("workers")) if runs else row.workers,
        "labels": row.labels,
        "baseline": table.baseline_of(row),
        "tuned": row.takes_tuned,
        "allreduce": bool(runs) and is_allreduce(runs[0]),
        "commands": [table.cell(row, "K", Path("runs"), variant).command for variant in variants],
        "settings": [_settings(table, collection.of(row.name, variant)) for variant in variants],
    }


def _settings(table: Table, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the hyperparameters of runs that differ only in their seeds, with the keys as a user types them."""
    if not runs:
        return {}
    found: dict[str, Any] = {}
    for group in HYPERPARAMETERS:
        for key, value in dict(runs[0].config.get(group) or {}).items():
            name = f"{group}.{key}"
            if not is_bookkeeping(name) and not OF_METHODS.fullmatch(name):
                found[name] = shorts(value) if isinstance(value, list) else short(value)
    return found


def only_differing(data: dict[str, Any]) -> dict[str, Any]:
    """Return a table's data with settings that are the same in all rows and variants taken out."""
    every = [settings for row in data["rows"] for settings in row["settings"] if settings]
    keys = {key for settings in every for key in settings}
    kept = {key for key in keys if any(settings.get(key) != every[0].get(key) for settings in every)}
    rows = [
        row | {"settings": [{key: of[key] for key in sorted(kept) if key in of} for of in row["settings"]]}
        for row in data["rows"]
    ]
    return data | {"rows": rows}


def sweep_of(table: Table) -> dict[str, Any] | None:
    """Return what a table's sweep chose and its trials: [place of the method, place of the point, seed, quantity].

    A point is {key: value} of all tuned keys.
    """
    if table.tuned is None or table.tuned_by:
        return None
    quantity, methods = table.tuned.sweep.quantity, dict(table.tuned.methods)
    with (SWEEPS / f"{table.name}.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    axes = [key for key in lines[0] if "." in key] if lines else []
    trials, points = [], Pool()
    for line in lines:
        method = "/".join(filter(None, [line["row"], line.get("variant")]))
        point = {axis: _of_cell(line[axis]) for axis in axes if line[axis]}
        trials.append([[*methods].index(method), points.add(point), int(line["seed"]), _of_cell(line[quantity])])
    names = dict(zip((row.name for row in table.rows), names_of(table.rows), strict=True))
    return {
        "quantity": quantity,
        "best": table.tuned.sweep.best,
        "methods": [
            {"id": name, "name": " / ".join([names.get(name.partition("/")[0], name), *name.split("/")[1:]])}
            | {"chosen": list(of.best.overrides), "value": short(of.best.mean), "edge": of.edge}
            | {"interval": of.interval and shorts(of.interval), "trials": of.trials, "diverged": of.diverged}
            for name, of in methods.items()
        ],
        "points": points.kept,
        "trials": trials,
    }


def _of_cell(text: str) -> object:
    """Return a cell of a CSV file, as a number if it is one; None if it is empty."""
    value = number(text)
    return (text or None) if value is None else short(value)


def definitions(tables: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return definition and direction of all quantities that some table has."""
    names = sorted({name for table in tables for name in table["quantities"]})
    return {n: {"what": QUANTITIES[n].definition, "higher": QUANTITIES[n].higher_is_better} for n in names}
