"""Conclusions from the records: the scoreboard with its evidence, and the gap between gossip and all-reduce.

A table appears among the gaps once it has runs of both. `CAUSES` are what a gap can be plotted against.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from common.experiments.collect import Collection
from common.experiments.definitions import names_in
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import FinishedRun
from common.experiments.table_file import PAPER, TABLES, Row
from common.experiments.tables import load_table
from common.explorer.records import is_allreduce, number, short, shorts
from common.report.claims import RECORDS, RULES, Claim, Evidence, load_claims, numbers_of_papers
from common.report.published import load_published
from common.report.statistics import difference

_table = cache(load_table)  # several claims rest on the same one


def claims() -> list[dict[str, Any]]:
    """Return all claims, in the order of results/definitions/claims.yaml."""
    papers = numbers_of_papers()
    return [_claim(claim, papers) for claim in load_claims()]


def _claim(claim: Claim, papers: Mapping[str, Any]) -> dict[str, Any]:
    rows = [test.found() for test in claim.tests]
    rule = None
    for name, limit in claim.rule.items():
        text, limits = RULES[name][0].format(limit), RULES[name][1](limit)
        rule = {"text": text, "limits": shorts(limits)}
    return {
        "claim": claim.claim,
        "paper": claim.paper.format_map(papers),
        "here": claim.show_numbers(rows),
        "regime": claim.show_regime(rows),
        "what": claim.what,
        "verdict": claim.verdict(rows),
        "rule": rule,
        "tests": [_test(test, row) for test, row in zip(claim.tests, rows, strict=True)],
    }


def _test(test: Evidence, row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: short(row[of]) for key, of in (("value", test.value), ("low", "low"), ("high", "high"))}
    path = PurePosixPath(test.record)
    found = {"label": test.label, "record": path.name, "row": test.row, **numbers}
    if path.parent.name == "tables":
        return found | {"page": f"tables/{path.name}.md", "compare": _compared(path.name, test.value, row)}
    return found | {"page": f"benchmarks/{path.name}.md"}


def _compared(name: str, value: str, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which rows of a table a number compares, None if it is not a difference between two of them."""
    if name not in names_in(TABLES):
        return None
    table = _table(name)
    row = next((row for row in table.rows if _is(row, found)), None)
    for column in table.numbers:
        others = {column.name: table.baseline_of, f"{column.name}_difference": table.equivalent_of}
        kinds = {"difference": column.name, "equivalent": f"{column.name}_difference"}
        if row and kinds.get(column.statistic) == value and (other := others[value](row)):
            chosen = {"table": name, "a": row.name, "b": other, "quantity": column.quantity.name}
            return chosen | ({"variant": column.variant} if column.variant else {})
    return None


def _is(row: Row, found: Mapping[str, Any]) -> bool:
    """Return whether a line of a table's CSV file is this row's: all labels in it are the row's."""
    labels = {"method": row.method, "topology": row.topology, "workers": row.workers, **row.labels}
    return all(str(found[key]) == str(value) for key, value in labels.items() if value is not None and key in found)


def benchmark_records(claims: list[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Return the benchmark records that claims rest on, line by line, column names first."""
    names = {test["record"] for claim in claims for test in claim["tests"] if "compare" not in test}
    records = {}
    for name in sorted(names):
        with (RECORDS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            records[name] = [
                [cell if (value := number(cell)) is None else f"{value:.6g}" for cell in line]
                for line in csv.reader(file)
            ]
    return records


# Each is a label of this name in a table's rows or, if there is none, the quantity of this name of its runs.
CAUSES = {
    "local_over_noise": "a worker's batch / gradient noise scale",
    "horizon": "horizon: tokens per parameter",
    "workers": "workers",
    "half_life_second": "half-life of the second moment (samples or tokens)",
}
SAME = {"top1": "accuracy"}  # another name of the same metric
UNITS = {"validation_loss": "nats", "accuracy": "points", "bleu": "BLEU"}


def gaps(collections: Sequence[Collection]) -> list[dict[str, Any]]:
    """Return a point for each gossip row and its all-reduce row, from our runs and from published numbers."""
    return [*(point for collection in collections for point in _of_table(collection)), *_published()]


def _of_table(collection: Collection) -> Iterator[dict[str, Any]]:
    table, quantity = collection.table, QUANTITIES[collection.table.metric]
    for variant in table.variants or [None]:
        runs = {row.name: collection.of(row.name, variant) for row in table.rows}
        for row in table.rows:
            partner = _partner(collection, row, runs)
            if partner is None:
                continue
            values, others = ({run.config["seed"]: quantity.of(run) for run in runs[of.name]} for of in (row, partner))
            shared = values.keys() & others.keys()
            values, others = ({seed: of[seed] for seed in shared} for of in (values, others))
            if quantity.higher_is_better:
                values, others = others, values  # a gap is how far gossip is behind
            between = difference(values, others)
            mean = between.mean if between.mean is not None else _mean(values, others)
            if mean is None:
                continue
            yield {
                "table": table.name,
                "variant": variant or "",
                "row": row.name,
                "partner": partner.name,
                "quantity": SAME.get(quantity.name, quantity.name),
                "seeds": len(shared),
                "tuned": row.takes_tuned and partner.takes_tuned,
                "gap": short(mean),
                "low": short(between.low),
                "high": short(between.high),
            } | {cause: short(value) for cause in CAUSES if (value := _cause(cause, row, runs[row.name])) is not None}


def _mean(values: Mapping[int, float | None], others: Mapping[int, float | None]) -> float | None:
    """Return the mean difference of too few seeds for an interval; None if a number is missing or not finite."""
    if not values or None in (*values.values(), *others.values()):
        return None
    mean = float(np.mean([values[seed] - others[seed] for seed in values]))
    return mean if np.isfinite(mean) else None


def _partner(collection: Collection, row: Row, runs: Mapping[str, Sequence[FinishedRun]]) -> Row | None:
    """Return the all-reduce row closest to a gossip row: by workers, horizon, labels, optimizer (AccumAdam as Adam)."""
    first, baseline = {name: of[0] for name, of in runs.items() if of}, collection.table.baseline_of(row)
    if row.name not in first or is_allreduce(first[row.name]):
        return None
    found = [
        other
        for other in collection.table.rows
        if other.name in first and is_allreduce(first[other.name])
        if first[other.name].total("workers") == first[row.name].total("workers")
        if other.labels.get("horizon") == row.labels.get("horizon")
    ]
    kinds = {name: run.config.get("optimizer", {}).get("name", "").removeprefix("accum") for name, run in first.items()}
    alike = {of.name: sum(of.labels[key] == row.labels[key] for key in row.labels) for of in found}
    return max(found, key=lambda o: (alike[o.name], kinds[o.name] == kinds[row.name], o.name == baseline), default=None)


def _cause(cause: str, row: Row, runs: Sequence[FinishedRun]) -> float | None:
    if cause in row.labels:
        return number(row.labels[cause])
    if cause == "workers":
        return runs[0].total("workers")
    if cause not in QUANTITIES:
        return None
    values = [QUANTITIES[cause].number_of(run) for run in runs]
    return None if None in values else float(np.mean(values))


def _published() -> Iterator[dict[str, Any]]:
    """Yield the points of files in results/paper whose rows state their horizon."""
    for name in names_in(PAPER):
        published = load_published(name)
        rows = [row for row in published.rows if "horizon" in row.labels]
        quantities = [quantity for quantity in published.quantities if quantity in UNITS]
        base = {_budget(row.labels): row for row in rows if row.labels["method"] == "AllReduce"}
        for row in rows:
            for quantity in quantities if row.labels["method"] != "AllReduce" else ():
                gap = row.values[quantity].value - base[_budget(row.labels)].values[quantity].value
                causes = {cause: row.labels[cause] for cause in CAUSES if cause in row.labels}
                names = {"table": name, "variant": "", "row": row.name, "partner": base[_budget(row.labels)].name}
                label = f"{row.labels['method']}, {row.labels['topology']}, {row.labels['schedule']}"
                about = {"name": label, "quantity": quantity, "seeds": 3, "tuned": True, "published": True}
                yield names | about | {"gap": short(gap), "low": None, "high": None} | causes


def _budget(labels: Mapping[str, Any]) -> tuple[Any, ...]:
    return labels["horizon"], labels["schedule"]
