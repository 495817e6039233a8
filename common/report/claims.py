"""The scoreboard: each claim of the papers, what our tables say about it, and a verdict by a rule stated beforehand."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import Field, PositiveFloat, model_validator

from common.cli import UsageError
from common.experiments.definitions import ROOT, Definition, load_definition, names_in
from common.experiments.table_file import PAPER
from common.report.published import load_published
from common.report.tables import markdown

RECORDS = ROOT / "results" / "benchmarks"
DEFINITIONS = ROOT / "results" / "definitions"
Interval = tuple[float, float]
Verdict = Literal["holds", "partly", "fails", "open"]
# The rule that a claim's numbers must meet, as readers see it, and the interval in which the claim holds.
RULES: Mapping[str, tuple[str, Callable[[Any], Interval]]] = {
    "equal": ("within ± {0:g}", lambda margin: (-margin, margin)),
    "above": ("above {0:g}", lambda bound: (bound, math.inf)),
    "below": ("below {0:g}", lambda bound: (-math.inf, bound)),
    "ratio": ("from {0[0]:g} to {0[1]:g}", lambda limits: limits),
    "exact": ("exactly {0:g}", lambda value: (value - 1e-9, value + 1e-9)),  # CSV files have ten digits
}


class Baseline(Definition):
    """What a row is compared with: the row that `where` (a query) finds among rows with equal values in `by`."""

    where: str
    by: list[str]


class Evidence(Definition):
    """A number that tests a claim, in a CSV file of a benchmark or table.

    where:    rows to keep, as a query of pandas
    join:     other files, whose columns are added where all of these columns agree
    baseline: adds columns `<number>_ratio`, a row's number over the baseline's
    assign:   more columns, as expressions of pandas
    row:      a query that finds the number's row
    value:    its column; the interval comes from the columns <value>_low and <value>_high, or is the number alone
    """

    record: str = Field(description="a CSV file without its extension, relative to results/benchmarks")
    label: str
    where: str | None = None
    join: dict[str, list[str]] = Field({}, description="CSV files to join: {file: columns that must agree}")
    baseline: Baseline | None = None
    assign: dict[str, str] = Field({})
    row: str
    value: str

    def found(self) -> Mapping[str, Any]:
        """Return the row, with `low` and `high`; raise UsageError unless there is exactly one."""
        rows = self._frame().query(self.row, engine="python").to_dict("records")
        if len(rows) != 1:
            raise UsageError(f"claims.yaml: {self.record}: row={self.row!r}: expected one row, got {len(rows)}")
        low, high = (rows[0].get(f"{self.value}_{end}", rows[0][self.value]) for end in ("low", "high"))
        return rows[0] | {"low": low, "high": high}

    def _frame(self) -> pd.DataFrame:
        frame = _read(self.record)
        for other, columns in self.join.items():
            frame = frame.merge(_read(other), on=columns, suffixes=("", f"_of_{Path(other).name}"))
        if self.where:
            frame = frame.query(self.where, engine="python").reset_index(drop=True)
        if self.baseline:
            by = self.baseline.by
            numbers = [name for name in frame.select_dtypes("number") if name not in by]
            base = frame.query(self.baseline.where, engine="python")[[*by, *numbers]]
            frame = frame.merge(base, on=by, how="left", suffixes=("", "_ratio"))
            for name in numbers:
                frame[f"{name}_ratio"] = frame[name] / frame[f"{name}_ratio"]
        more = {name: frame.eval(expression, engine="python") for name, expression in self.assign.items()}
        return frame.copy().assign(**more)  # a copy is in one piece; pandas warns of fragmented frames


def _read(record: str) -> pd.DataFrame:
    path = RECORDS / f"{record}.csv"
    if not path.exists():
        raise UsageError(f"{path}: no such record")
    return pd.read_csv(path)


class Claim(Definition):
    """A claim of the papers. Accuracy or loss refutes it only where local/B is within a factor of two of the paper's.

    paper:            published values; {table3[allreduce][top1]} is that number of results/paper/table3.yaml
    local_over_noise: the paper's batch per worker over the gradient noise scale; null where it does not matter
    rule:             one of RULES and its margin, bound or limits
    what:             the numbers tested, and their unit
    regime:           the regime, a template filled with the columns of the first test's row; or why there is no test
    settled_by:       the experiment that would settle an open claim, and its cost
    """

    claim: str
    paper: str
    local_over_noise: PositiveFloat | Literal["unknown"] | None = None
    rule: dict[Literal[tuple(RULES)], float | tuple[float, float]] = Field({}, max_length=1)
    what: str = ""
    style: str = "+z.2f"
    regime: str
    settled_by: str = ""
    tests: tuple[Evidence, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Claim":
        if bool(self.rule) != bool(self.tests):
            raise ValueError("rule: expected with tests, and only with them")
        if any((name == "ratio") != isinstance(limit, tuple) for name, limit in self.rule.items()):
            raise ValueError("rule: expected two limits for ratio, one number for the others")
        return self

    def verdict(self, rows: Sequence[Mapping[str, Any]]) -> Verdict:
        """Return the verdict on the rows of its tests: theirs if all agree, else partly if some hold, else fails."""
        verdicts = {self._verdict_of(row) for row in rows} or {"open"}
        if len(verdicts) == 1:
            return verdicts.pop()
        return "partly" if "holds" in verdicts else "fails"

    def _verdict_of(self, row: Mapping[str, Any]) -> Verdict:
        ((name, limit),) = self.rule.items()
        low, high = RULES[name][1](limit)
        if low <= row["low"] and row["high"] <= high:
            return "holds"
        papers = self.local_over_noise
        in_papers_regime = papers is None or (papers != "unknown" and papers / 2 <= _noise_of(row) <= papers * 2)
        return "fails" if in_papers_regime and (row["high"] < low or high < row["low"]) else "open"

    def show_numbers(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the numbers of its tests and the rule; "" without a test."""
        if not rows:
            return ""
        numbers = []
        for test, row in zip(self.tests, rows, strict=True):
            value, low, high = (f"{number:{self.style}}" for number in (row[test.value], row["low"], row["high"]))
            numbers.append(f"{test.label} {value}" + ("" if low == high else f" [{low}, {high}]"))
        ((name, limit),) = self.rule.items()
        return f"{self.what}: {', '.join(numbers)}; rule: {RULES[name][0].format(limit)}"

    def show_regime(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the regime of the first number, with local/B of all, or why there is no test; what would settle it."""
        regime = self.regime.format_map(rows[0]) if rows else self.regime
        if rows and self.local_over_noise is not None:
            noise = [value for value in map(_noise_of, rows) if not math.isnan(value)]
            regime = f"{regime}, local/B {_show_noise(noise)}"
        return f"{regime}. To settle it: {self.settled_by}" if self.settled_by else regime


def _noise_of(row: Mapping[str, Any]) -> float:
    """Return a worker's batch over the gradient noise scale, NaN if it is not recorded."""
    return next((value for name, value in row.items() if name.endswith("local_over_noise_mean")), math.nan)


def _show_noise(values: Sequence[float]) -> str:
    """Return the range of local/B; a value of zero or below means that it was not resolved."""
    if not values:
        return "not recorded"
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    if min(values) <= 0:
        return "not resolved" if max(values) <= 0 else f"at most {high}"
    return high if low == high else f"{low} to {high}"


class Claims(Definition):
    """The content of results/definitions/claims.yaml."""

    claims: tuple[Claim, ...] = Field(min_length=1)


def load_claims() -> tuple[Claim, ...]:
    """Read the claims; raise UsageError naming file, key, value and expectation if the file is wrong."""
    return load_definition(DEFINITIONS, "claims", Claims, key="claims").claims


def numbers_of_papers() -> dict[str, dict[str, dict[str, float | None]]]:
    """Return {file of results/paper: {row: {quantity: number}}}, which `Claim.paper` refers to."""
    return {
        name: {row.name: {key: number.value for key, number in row.values.items()} for row in load_published(name).rows}
        for name in names_in(PAPER)
    }


def show_claims(claims: Sequence[Claim]) -> str:
    """Return the scoreboard as Markdown."""
    papers, lines = numbers_of_papers(), []
    for claim in claims:
        rows, paths = [test.found() for test in claim.tests], [PurePosixPath(test.record) for test in claim.tests]
        pages = dict.fromkeys(f"[{path.name}]({path.parent.name or 'benchmarks'}/{path.name}.md)" for path in paths)
        paper, here, regime = claim.paper.format_map(papers), claim.show_numbers(rows), claim.show_regime(rows)
        lines.append((claim.claim, claim.verdict(rows), paper, here, regime, ", ".join(pages)))
    return _markdown(["claim", "verdict", "paper", "here", "regime", "page"], lines)


def show_verdicts(claims: Sequence[Claim]) -> str:
    """Return the claims by verdict, as Markdown."""
    by_verdict: dict[str, list[str]] = {verdict: [] for verdict in get_args(Verdict)}
    for claim in claims:
        by_verdict[claim.verdict([test.found() for test in claim.tests])].append(claim.claim)
    return _markdown(["verdict", "claims"], [(name, "; ".join(texts)) for name, texts in by_verdict.items()])


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown(pd.DataFrame(lines, columns=columns), left=columns)


BLOCK = re.compile(r"(<!-- table: (claims|verdicts) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_blocks(text: str) -> str:
    """Return a README with its blocks regenerated."""
    show = {"claims": show_claims, "verdicts": show_verdicts}
    return BLOCK.sub(lambda block: f"{block[1]}\n{show[block[2]](load_claims())}\n\n", text)
