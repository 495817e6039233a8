"""The scoreboard: numbers from CSV files, the verdicts that follow from them, and the README between its markers."""

import math
from pathlib import Path

import pytest

from common.cli import UsageError
from common.report.claims import Claim, Evidence, load_claims, show_claims
from scripts.tables import main

EVIDENCE = {"record": "speed", "label": "ours", "row": "engine == 'ours'", "value": "ms"}
CLAIM = {"claim": "", "paper": "", "regime": "{engine}", "rule": {"equal": 1.0}, "tests": [EVIDENCE]}


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
    assert claim.verdict([rows["fails"], rows["open"]]) == "fails"


@pytest.mark.parametrize(("noise", "verdict"), [(None, "open"), (0.009, "open"), (0.02, "fails"), (0.041, "open")])
def test_only_the_papers_regime_refutes(noise, verdict):
    claim = Claim.model_validate(CLAIM | {"local_over_noise": 0.02})
    recorded = {} if noise is None else {"local_over_noise_mean": noise}
    assert claim.verdict([{"low": 2.0, "high": 3.0} | recorded]) == verdict
    assert claim.verdict([{"low": 0.0, "high": 0.0} | recorded]) == "holds"
    said = "not recorded" if noise is None else noise
    assert claim.show_regime([{"engine": "ours"} | recorded]) == f"ours, local/B {said}"
    unknown = Claim.model_validate(CLAIM | {"local_over_noise": "unknown"})
    assert unknown.verdict([{"low": 2.0, "high": 3.0} | recorded]) == "open"


@pytest.mark.parametrize(
    ("values", "said"),
    [((0.02, 0.004), "0.004 to 0.02"), ((0.02, -0.001), "at most 0.02"), ((-0.02, -0.001), "not resolved")],
)
def test_the_regime_is_that_of_all_numbers(values, said):
    claim = Claim.model_validate(CLAIM | {"local_over_noise": 0.02})
    rows = [{"engine": "ours", "local_over_noise_mean": value} for value in values]
    assert claim.show_regime(rows) == f"ours, local/B {said}"


def test_the_row_of_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr("common.report.claims.RECORDS", tmp_path)
    (tmp_path / "speed.csv").write_text("engine,ms,ms_low,ms_high\nours,0.25,0.1,0.4\npeer,5,,\n")
    lines = show_claims([Claim.model_validate(CLAIM | {"what": "ms", "paper": "{table3[allreduce][top1]}"})])
    assert lines.splitlines()[2] == (
        "|  | holds | 76.01 | ms: ours +0.25 [+0.10, +0.40]; rule: within ± 1 | ours | [speed](benchmarks/speed.md) |"
    )
    for row in ("engine == 'none'", "ms > 0"):
        with pytest.raises(UsageError, match=r"expected one row, got [02]"):
            show_claims([Claim.model_validate(CLAIM | {"tests": [EVIDENCE | {"row": row}]})])


@pytest.mark.parametrize("claim", load_claims(), ids=lambda claim: claim.claim)
def test_what_would_settle_an_open_claim_is_told(claim):
    verdict = claim.verdict([test.found() for test in claim.tests])
    assert bool(claim.settled_by) == (verdict == "open") or verdict == "partly"
    assert ("To settle it: " in claim.show_regime([])) == bool(claim.settled_by)


@pytest.mark.parametrize("wrong", [{"rule": {}}, {"rule": {"ratio": 1.0}}, {"rule": {"equal": [1, 2]}}, {"tests": []}])
def test_what_is_wrong_is_refused(wrong):
    with pytest.raises(ValueError, match="rule: expected"):
        Claim.model_validate(CLAIM | wrong)


def test_numbers_of_several_files_beside_a_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr("common.report.claims.RECORDS", tmp_path)
    (tmp_path / "speed.csv").write_text("engine,hosts,ms\nours,4,50\nours,8,90\npeer,4,200\npeer,8,100\n")
    (tmp_path / "steps.csv").write_text("engine,steps\nours,10\npeer,20\n")
    found = Evidence(
        record="speed",
        label="ours",
        where="hosts == 4",
        join={"steps": ["engine"]},
        baseline={"where": "engine == 'peer'", "by": ["hosts"]},
        assign={"s": "steps * ms / 1000"},
        row="engine == 'ours'",
        value="ms_ratio",
    ).found()
    assert [found[name] for name in ("ms_ratio", "low", "high", "s", "steps_ratio")] == [0.25, 0.25, 0.25, 0.5, 0.5]
    with pytest.raises(UsageError, match=r"none\.csv: no such record"):
        Evidence(record="none", label="", row="", value="").found()


def test_only_what_is_between_the_markers_changes(monkeypatch):
    monkeypatch.setattr(
        "common.report.claims.load_claims",
        lambda: [Claim.model_validate({"claim": "C", "paper": "P", "regime": "not tested"})],
    )
    Path("A.md").write_text("# A\n\n<!-- table: claims -->\nold\n<!-- end -->\n\nB <!-- table: other --> C\n")
    assert main(["readme=A.md"]) == 0
    filled = Path("A.md").read_text()
    row = "| C | open | P |  | not tested |  |"
    assert filled.startswith("# A\n\n<!-- table: claims -->\n\n| claim | verdict | paper | here | regime | page |\n")
    assert filled.endswith(f"{row}\n\n<!-- end -->\n\nB <!-- table: other --> C\n")
    assert "old" not in filled
