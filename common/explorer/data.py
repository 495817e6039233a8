"""Everything that the page shows, gathered from kept records, the user's runs and definitions."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scipy import stats
from scipy.optimize import brentq
from tqdm import tqdm

from common.experiments.collect import Collection, collect
from common.experiments.definitions import names_in
from common.experiments.derived import ASSUMED
from common.experiments.runs import RunError, read_run, runs_below
from common.experiments.table_file import TABLES
from common.experiments.tables import load_table
from common.explorer import clusters, evidence
from common.explorer.records import ALSO, CURVES, Records, definitions, sweep_of
from common.report.power import LEVEL, POWER, power_of_difference
from common.report.published import PAPERS, load_published
from common.report.statistics import FEWEST_SEEDS

MOST = 200  # seeds up to which the page knows how small a difference they detect
LOOSE = "other_runs"  # the name under which runs of no table are shown


def build(roots: Sequence[Path]) -> dict[str, Any]:
    """Return the page's data on finished runs below these folders; raise UsageError if a definition is wrong."""
    loaded = map(load_table, tqdm(names_in(TABLES), "reading tables", disable=None))
    collections = [found for table in loaded if (found := collect(table, *roots, allow_empty=True)).all_runs]
    records = Records()
    tables = {found.table.name: records.table(found) for found in collections}
    if loose := _loose(roots, collections, records):
        tables[LOOSE] = loose
    claims = evidence.claims()
    points = evidence.gaps(collections)
    data = {
        "claims": claims,
        "records": evidence.benchmark_records(claims),
        "tables": tables,
        "grids": records.grids.kept,
        "commits": records.commits.kept,
        "quantities": definitions(tables.values()),
        "curves": CURVES,
        "sweeps": {of.table.name: sweep for of in collections if (sweep := sweep_of(of.table))},
        "gap": {"points": points, "causes": evidence.CAUSES, "units": evidence.UNITS, "sources": _sources(points)},
        "distances": clusters.distances(collections),
        "topologies": clusters.topologies(),
        "planner": clusters.planner(),
        "seeds": _seeds(),
        "assumed": ASSUMED,
    }
    return json.loads(json.dumps(data))  # as the page has it: lists for tuples


def _loose(roots: Sequence[Path], collections: Sequence[Collection], records: Records) -> dict[str, Any] | None:
    """Return a table of the finished runs in these folders that belong to no table, one row each; None without any."""
    known = {run.folder for found in collections for run in found.all_runs}
    names = ["validation_loss", "accuracy", *ALSO]
    rows, runs = [], []
    for root in roots:
        for path in runs_below(root):
            if path in known or "sweeps" in path.relative_to(root).parts:
                continue
            try:
                run = read_run(path)
                numbers = records.run(run, names)
            except RunError:
                continue
            command = run.environment.get("command", "")
            about = {"labels": {}, "baseline": None, "tuned": False, "settings": [{}], "method": "", "topology": ""}
            shown = {"id": str(path), "name": str(path), "commands": [command], "workers": run.summary.get("workers")}
            rows.append(about | shown | {"allreduce": False})
            runs.append(numbers | {"row": len(rows) - 1, "variant": 0, "seed": run.config.get("seed", 0)})
    if not runs:
        return None
    about = {"title": "Finished runs that no table lists", "metric": "validation_loss", "labels": {}, "variants": [""]}
    return about | {"quantities": names, "rows": rows, "runs": runs, "missing": 0}


def _sources(points: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return where published points come from, by file name."""
    names = dict.fromkeys(point["table"] for point in points if point.get("published"))
    files = {name: load_published(name) for name in names}
    return {name: f"{file.title}. {PAPERS[file.paper]}: {file.source}" for name, file in files.items()}


@cache
def _seeds() -> dict[str, Any]:
    """Return what the page needs of t distributions, for `fewest` seeds and more.

    t:      97.5 % quantiles: a mean's 95 % interval is that times the standard error
    effect: the smallest mean difference, in standard deviations, that this many seeds can tell from zero
    """
    counts = range(FEWEST_SEEDS, MOST + 1)
    return {
        "t": [float(f"{stats.t.ppf(1 - LEVEL / 2, n - 1):.8g}") for n in counts],
        "effect": [float(f"{_effect(n):.6g}") for n in counts],
        "power": POWER,
        "fewest": FEWEST_SEEDS,
        "most": MOST,
    }


def _effect(seeds: int) -> float:
    return brentq(lambda effect: power_of_difference(seeds, 1.0, effect, LEVEL) - POWER, 0.01, 10)
