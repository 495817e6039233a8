"""Claims lead to the rows that they compare; gaps are differences of gossip and its all-reduce."""

from pathlib import Path

import pytest

from common.experiments.collect import collect
from common.experiments.definitions import ROOT
from common.experiments.quantities import QUANTITIES
from common.experiments.tables import load_table
from common.explorer import data
from common.explorer.evidence import claims, gaps
from common.report.claims import load_claims
from common.report.power import LEVEL, power_of_difference, seeds_for
from common.report.statistics import difference, mean_and_interval
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run


@pytest.mark.slow
def test_claims_have_their_verdicts_and_lead_to_the_rows_that_they_compare():
    found = claims()
    expected = [claim.verdict([test.found() for test in claim.tests]) for claim in load_claims()]
    assert [claim["verdict"] for claim in found] == expected
    tests = [test for claim in found for test in claim["tests"] if test.get("compare")]
    tables = {test["compare"]["table"] for test in tests}
    assert {"table3_seeds", "table3_matched", "gpt2_matched", "table2_fair"} <= tables
    for test in tests:
        chosen = test["compare"]
        if chosen["table"] != "table2_fair":
            continue  # reading all takes a minute
        collection, quantity = collect(load_table(chosen["table"]), ROOT / "results" / "runs"), chosen["quantity"]
        values, others = (
            {
                run.config["seed"]: QUANTITIES[quantity].of(run)
                for run in collection.of(chosen[row], chosen.get("variant"))
            }
            for row in "ab"
        )
        numbers = difference(values, others)
        shown = [test[key] for key in ("value", "low", "high")]
        assert shown == pytest.approx([numbers.mean, numbers.low, numbers.high], rel=1e-5)


def gap_of(**changes):
    labels = {"labels": {"horizon": "tokens per parameter"}, "metric": "validation_loss"}
    names = {"allreduce": {}, "accumadam_aer": {}}
    rows = [
        row | {"name": f"{row['name']}_{horizon}", "labels": {"horizon": str(horizon)}}
        for horizon in (5, 10)
        for row in CONTENT["rows"]
        if row["name"] in names
    ]
    return make_table(**labels, rows=rows, columns=["method", "validation_loss_mean"], **changes)


def test_a_table_with_a_horizon_appears_by_itself():
    """A row of gossip is compared with the all-reduce row that has the same horizon."""
    losses = {"allreduce_5": 4.0, "accumadam_aer_5": 4.3, "allreduce_10": 3.5, "accumadam_aer_10": 3.6}
    table = gap_of()
    for cell in table.cells(Path("runs")):
        loss = losses[cell.row.name] + 0.01 * int(cell.seed) * (cell.row.method != "AllReduce")
        folder = write_run(cell.run_dir, cell.overrides, metrics={"loss": loss}, workers=8)
        if cell.row.method == "AllReduce":
            config = folder / "config.yaml"
            config.write_text(config.read_text().replace("method: decentralized", "method: allreduce"))
    points = [point for point in gaps([collect(table, Path("runs"))]) if not point.get("published")]
    assert [(p["row"], p["partner"], p["horizon"], p["workers"], p["seeds"]) for p in points] == [
        ("accumadam_aer_5", "allreduce_5", 5, 8, 3),
        ("accumadam_aer_10", "allreduce_10", 10, 8, 3),
    ]
    assert [point["gap"] for point in points] == pytest.approx([0.32, 0.12])
    assert (points[0]["low"], points[0]["high"]) == pytest.approx(mean_and_interval([0.31, 0.32, 0.33])[1:], rel=1e-5)


def test_of_accuracies_the_gap_is_how_many_points_gossip_is_behind():
    collection = collect(load_table("quickstart"), ROOT / "results" / "runs")
    (point, *_) = gaps([collection])
    assert point["quantity"] == "accuracy"
    one, other = (
        {run.config["seed"]: QUANTITIES["accuracy"].of(run) for run in collection.of(point[k])}
        for k in ("row", "partner")
    )
    assert point["gap"] == pytest.approx(difference(other, one).mean, rel=1e-5)


def test_gossip_is_compared_with_all_reduce_of_its_optimizer():
    points = gaps([collect(load_table("muon"), ROOT / "results" / "runs")])
    partners = {point["row"]: point["partner"] for point in points if point["table"] == "muon"}
    gossip, allreduce = ("adamw_aer", "accumadamw_aer", "muon_aer"), ("adamw_allreduce",) * 2 + ("muon_allreduce",)
    assert partners == dict(zip(gossip, allreduce, strict=True))


def test_published_gaps_of_the_first_author():
    """At 20, 40 and 80 tokens per parameter, as the source has them."""
    points = [point for point in gaps([]) if "cosine" in point["name"]]
    found = {(point["workers"], point["horizon"]): point["gap"] for point in points}
    expected = {(4, 20): 0.0205, (8, 20): 0.0358, (4, 40): 0.0114, (8, 40): 0.0176, (4, 80): 0.0037, (8, 80): 0.0079}
    assert found == pytest.approx(expected, abs=6e-5)


def test_seeds_that_a_difference_takes_are_those_of_the_power_analysis():
    seeds = data._seeds()
    for effect in (0.25, 0.5, 1.0, 1.7, 2.5, 4.0):
        needed = seeds_for(power_of_difference, 1.0, effect, LEVEL)
        assert next(i for i, least in enumerate(seeds["effect"]) if least <= effect) + seeds["fewest"] == needed
    differences = [0.1, 0.4, -0.2, 0.3, 0.2]
    mean, _, high = mean_and_interval(differences)
    sd = (sum((d - mean) ** 2 for d in differences) / 4) ** 0.5
    assert mean + seeds["t"][5 - seeds["fewest"]] * sd / 5**0.5 == pytest.approx(high, rel=1e-7)
