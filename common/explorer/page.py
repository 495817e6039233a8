"""The page: its template, style and scripts, and every view's numbers as plain tables, all in one HTML file."""

import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import vl_convert

from common.cli import UsageError
from common.report.claims import Verdict

PLACE = Path(__file__).parent
SCRIPTS = ("core.js", "charts.js", "claims.js", "curves.js", "clusters.js", "planner.js")
QUARTERS = (0.25, 0.5, 0.75, 1.0)
Line = Sequence[object]


def render(data: dict[str, Any], live: Sequence[dict[str, Any]] | None = None, results: str = ".") -> str:
    """Return the page.

    live:    runs that have not ended, if the page is to show them; it then keeps reloading itself
    results: folder of the kept tables and pages, as seen from the page
    """
    scripts = "\n".join((PLACE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "STYLE": (PLACE / "style.css").read_text(encoding="utf-8"),
        "VEGA": f"(() => {{{_vega()}}})();",
        "SCRIPTS": scripts,
        "DATA": _json(data),
        "ABOUT": _json({"live": live, "results": results}),
        **{name.upper(): "\n".join(tables) for name, tables in _tables(data, live).items()},
    }
    page = (PLACE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], page)


def read_page(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """Return the data of a page, and its runs that had not ended; raise UsageError if the file is not such a page."""
    text, found = path.read_text(encoding="utf-8"), []
    for name in ("data", "about"):
        part = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
        if part is None:
            raise UsageError(f"{path}: expected a page that scripts.report has written")
        found.append(json.loads(part[1]))
    return found[0], found[1]["live"]


def differences(page: object, records: object, at: str = "") -> Iterator[str]:
    """Yield where a page's data differ from the data made from the records, numbers by more than rounding."""
    if isinstance(page, dict) and isinstance(records, dict):
        for key in dict.fromkeys([*records, *page]):
            here = f"{at}.{key}" if at else str(key)
            if key in page and key in records:
                yield from differences(page[key], records[key], here)
            else:
                yield f"{here}: {'only on the page' if key in page else 'missing on the page'}"
    elif isinstance(page, list) and isinstance(records, list):
        if len(page) != len(records):
            yield f"{at}: {len(page)} entries on the page, {len(records)} by the records"
        for place, (one, other) in enumerate(zip(page, records, strict=False)):
            yield from differences(one, other, f"{at}[{place}]")
    elif not _equal(page, records):
        yield f"{at}: {page!r} on the page, {records!r} by the records"


def _equal(one: object, other: object) -> bool:
    numbers = [value for value in (one, other) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == 2:
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12)
    return type(one) is type(other) and one == other


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one minified script."""
    code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return re.sub(r"</(?=script)", r"<\\/", code, flags=re.IGNORECASE)


def _tables(data: dict[str, Any], live: Sequence[dict[str, Any]] | None) -> dict[str, list[str]]:
    """Return the plain tables of each view."""
    return {
        "scoreboard": [_scoreboard(data["claims"])],
        "compare": [_compare(data, name) for name in data["tables"]],
        "curves": [_curves(data, name) for name in data["tables"]],
        "gap": [_gap(data)],
        "rates": [_rates(name, sweep) for name, sweep in data["sweeps"].items()],
        "topology": [_topologies(data["topologies"]["families"]), _distances(data["distances"])],
        "planner": [_planner(example) for example in data["planner"]["examples"]],
        "live": [_live(live or [])],
    }


def _table(caption: str, head: Line, lines: Sequence[Line], attributes: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a line names it. Numbers are aligned to the right."""

    def cell(value: object, first: bool) -> str:
        number = isinstance(value, int | float)
        text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
        tag, kind = ("th scope=row", "") if first else ("td", " class=n" * number)
        return f"<{tag}{kind}>{html.escape(text)}</{tag.split()[0]}>"

    heads = "".join(f"<th scope=col>{html.escape(str(name))}</th>" for name in head)
    rows = [
        f"<tr{more and f' {more}'}>{''.join(cell(value, not place) for place, value in enumerate(line))}</tr>"
        for line, more in zip(lines, attributes or [""] * len(lines), strict=True)
    ]
    body = "\n".join(rows)
    return f"<table><caption>{html.escape(caption)}</caption>\n<tr>{heads}</tr>\n{body}\n</table>"


def _scoreboard(claims: Sequence[dict[str, Any]]) -> str:
    head = ("claim", "verdict", "regime", "paper", "here")
    lines = [tuple(claim[key] for key in head) for claim in claims]
    marks = [f"data-claim={place} data-verdict={claim['verdict']}" for place, claim in enumerate(claims)]
    count = Counter(claim["verdict"] for claim in claims)
    verdicts = ", ".join(f"{verdict} {count[verdict]}" for verdict in get_args(Verdict) if count[verdict])
    return _table(f"{len(claims)} claims: {verdicts}", head, lines, marks)


def _each(table: dict[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield name, variant and runs of the rows that have runs."""
    for place, row in enumerate(table["rows"]):
        for number, variant in enumerate(table["variants"]):
            if runs := [run for run in table["runs"] if (run["row"], run["variant"]) == (place, number)]:
                yield row["name"], variant, runs


def _mean(values: Sequence[object]) -> tuple[float | None, float | None]:
    """Return mean and two sample standard deviations; None where there is no such number."""
    if not values or not all(isinstance(value, int | float) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, 2 * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _compare(data: dict[str, Any], name: str) -> str:
    table = data["tables"][name]
    metric = table["metric"]
    place = table["quantities"].index(metric)
    lines = [
        (row, variant, len(runs), *_mean([run["values"][place] for run in runs])) for row, variant, runs in _each(table)
    ]
    return _table(f"{name}: {table['title']}", ("row", "variant", "seeds", f"mean {metric}", "2 sigma"), lines)


def _curves(data: dict[str, Any], name: str) -> str:
    """Return the mean over seeds of the table's metric (else of the training loss) at four points of a curve."""
    table = data["tables"][name]
    recorded = {curve for run in table["runs"] for curve in run["curves"]}
    curve = next((c for c in (table["metric"], "accuracy", "bleu", "validation_loss") if c in recorded), "train_loss")
    lines = []
    for row, variant, runs in _each(table):
        drawn = [run["curves"][curve] for run in runs if curve in run["curves"]]
        if len(drawn) < len(runs):
            continue
        steps = data["grids"][drawn[0][0]]["steps"]
        at = [max(0, math.ceil(share * len(steps)) - 1) for share in QUARTERS]
        means = [_mean([values[place] for _, values in drawn if place < len(values)])[0] for place in at]
        lines.append((row, variant, steps[-1], *means))
    heads = [f"at {share:.0%}" for share in QUARTERS]
    return _table(f"{name}: {data['curves'][curve]} over a run", ("row", "variant", "steps", *heads), lines)


def _gap(data: dict[str, Any]) -> str:
    head = ("table", "row", "variant", "quantity", "gap", "low", "high", "seeds", *data["gap"]["causes"])
    lines = [tuple(map(point.get, head)) for point in data["gap"]["points"]]
    return _table("How far gossip is behind all-reduce", head, lines)


def _rates(name: str, sweep: dict[str, Any]) -> str:
    head = ("method", "chosen", f"{sweep['quantity']}", "interval of the rate", "edge", "trials", "diverged")
    lines = [
        (
            *(of["name"], " ".join(of["chosen"]), of["value"], _interval(of["interval"]), of["edge"]),
            *(of["trials"], of["diverged"]),
        )
        for of in sweep["methods"]
    ]
    return _table(f"{name}: values chosen by its sweep", head, lines)


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3g} to {ends[1]:.3g}"


def _topologies(families: dict[str, Any]) -> str:
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, sizes in families.items():
        for size, of in sizes.items():
            workers, of_host = size.split("/")
            numbers = of["period"] or "random", of["gap"], of["consensus"] or "more than 2000"
            alike.setdefault((name, int(workers), *numbers), []).append(of_host)
    head = ("topology", "workers", "period", "spectral gap", "rounds to average to within 1e-10", "workers per host")
    return _table("Topologies", head, [(*line, ", ".join(hosts)) for line, hosts in alike.items()])


def _distances(distances: Sequence[dict[str, Any]]) -> str:
    head = ("table", "name", "variant", "family", "workers", "per_host", "seeds", "measured", "predicted")
    return _table("Consensus distances", head, [tuple(line[key] for key in head) for line in distances])


def _planner(example: dict[str, Any]) -> str:
    of = example["settings"]
    caption = (
        f"Predicted step: {of['hosts']} hosts with {of['per_host']} workers each, {of['mbit']:g} Mbit/s, delay "
        f"{of['delay']:g} ms, {of['million']:g} M parameters, compute {of['compute']:g} ms, jitter {of['jitter']:g}"
    )
    lines = [(step["method"], step["step"], step["compute"] / step["step"]) for step in example["steps"]]
    return _table(caption, ("method", "step, ms", "utilisation"), lines)


def _live(live: Sequence[dict[str, Any]]) -> str:
    head = ("run", "state", "step", "share", "seconds_left", "loss", "written")
    return _table("Runs that have not finished", head, [tuple(line[key] for key in head) for line in live])
