"""The scoreboard of results/README.md: every verdict follows from the tables' CSV files."""

import math

import pytest

from common.cli import UsageError
from common.experiments.definitions import ROOT
from common.report.claims import Claim, load_claims, show_claims
from common.report.excerpts import BLOCK

EVIDENCE = {"record": "speed", "label": "ours", "row": "engine == 'ours'", "value": "ms"}
CLAIM = {"claim": "", "paper": "", "regime": "{engine}", "rule": {"equal": 1.0}, "tests": [EVIDENCE]}


def test_the_readme_shows_what_the_tables_say():
    made = {match["name"]: match[0] for match in BLOCK.finditer((ROOT / "results" / "README.md").read_text())}
    shown = f"<!-- table: claims -->\n\n{show_claims(load_claims())}\n\n<!-- end -->"
    assert made["claims"] == shown, "python -m scripts.tables readme=results/README.md"


@pytest.mark.parametrize(
    ("rule", "holds", "fails", "leaves_open"),
    [
        ({"equal": 1.0}, (-1, 0.5), (1.1, 2), (0.5, 1.5)),
        ({"above": 0.5}, (0.5, 9), (-1, 0.4), (0.4, 9)),
        ({"below": 0.0}, (-2, 0), (0.1, 1), (-1, 0.1)),
        ({"ratio": [0.4, 0.7]}, (0.4, 0.6), (0.8, 0.9), (0.6, 0.8)),
        ({"exact": 1.0}, (1, 1), (1.1, 1.1), (math.nan, math.nan)),
    ],
)
def test_rules_turn_intervals_into_verdicts(rule, holds, fails, leaves_open):
    claim = Claim.model_validate(CLAIM | {"rule": rule})
    intervals = {"holds": holds, "fails": fails, "open": leaves_open}
    rows = {verdict: {"low": low, "high": high} for verdict, (low, high) in intervals.items()}
    assert [claim.verdict([row]) for row in rows.values()] == list(rows)
    assert claim.verdict([rows["holds"], rows["holds"]]) == "holds"
    assert claim.verdict([rows["fails"], rows["holds"]]) == "partly"
    assert claim.verdict([rows["fails"], rows["open"]]) == "open"


@pytest.mark.parametrize(("noise", "verdict"), [(None, "open"), (0.009, "open"), (0.02, "fails"), (0.041, "open")])
def test_only_the_papers_regime_refutes(noise, verdict):
    claim = Claim.model_validate(CLAIM | {"local_over_noise": 0.02})
    recorded = {} if noise is None else {"local_over_noise_mean": noise}
    assert claim.verdict([{"low": 2.0, "high": 3.0} | recorded]) == verdict
    assert claim.verdict([{"low": 0.0, "high": 0.0} | recorded]) == "holds"
    unknown = Claim.model_validate(CLAIM | {"local_over_noise": "unknown"})
    assert unknown.verdict([{"low": 2.0, "high": 3.0} | recorded]) == "open"


def test_the_row_of_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr("common.report.records.RECORDS", tmp_path)
    (tmp_path / "speed.csv").write_text("engine,ms,ms_low,ms_high\nours,0.25,0.1,0.4\npeer,5,,\n")
    lines = show_claims([Claim.model_validate(CLAIM | {"what": "ms", "paper": "{table3[allreduce][top1]}"})])
    assert lines.splitlines()[2] == (
        "|  | 76.01 | ms: ours +0.25 [+0.10, +0.40]; rule: within ± 1; ours | holds | [speed](benchmarks/speed.md) |"
    )
    for row in ("engine == 'none'", "ms > 0"):
        with pytest.raises(UsageError, match=r"expected one row, got [02]"):
            show_claims([Claim.model_validate(CLAIM | {"tests": [EVIDENCE | {"row": row}]})])


@pytest.mark.parametrize("wrong", [{"rule": {}}, {"rule": {"ratio": 1.0}}, {"rule": {"equal": [1, 2]}}, {"tests": []}])
def test_what_is_wrong_is_refused(wrong):
    with pytest.raises(ValueError, match="rule: expected"):
        Claim.model_validate(CLAIM | wrong)
