"""What the page gets of runs: numbers in few digits, curves of few points, and what rows differ in."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from common.experiments.collect import collect
from common.experiments.definitions import ROOT
from common.experiments.sweeps import read_tuned
from common.experiments.tables import load_table
from common.explorer.records import Records, line_of, names_of, short, sweep_of, thin
from tests.experiments.synthetic import write_run


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(1.23456789, 1.23457), (3.0, 3), (np.float64(0.1), 0.1), (np.int64(7), 7), (1e-9, 1e-9), (2.5e20, 2.5e20)],
        *[(math.nan, "nan"), (-math.inf, "-inf"), (None, None), ("text", "text"), (True, True)],
    ],
)
def test_numbers_have_six_digits_and_fit_into_json(value, shown):
    assert short(value) == shown
    assert type(short(value)) is type(shown)
    assert json.loads(json.dumps(short(value), allow_nan=False)) == shown


def test_long_curves_are_means_of_neighbours_at_the_last_of_their_steps():
    steps, values = np.arange(10, 110, 10), np.arange(10.0)
    assert [part.tolist() for part in thin(steps, values, 100)] == [steps.tolist(), values.tolist()]
    thinned = thin(steps, values, 4)  # threes, and the first alone
    assert [part.tolist() for part in thinned] == [[10, 40, 70, 100], [0, 2, 5, 8]]
    assert np.isnan(thin(steps, np.where(values == 4, np.nan, values), 4)[1]).tolist() == [False, False, True, False]


def test_what_is_proportional_to_steps_is_a_number():
    assert line_of([1, 2, 4], np.array([0.5, 1, 2])) == 0.5
    assert line_of([1, 2, 4], np.array([0.5, 1, 3])) == [0.5, 1, 3]


def test_a_table(table):
    for cell in list(table.cells(Path("runs")))[1:]:
        write_run(cell.run_dir, cell.overrides, accuracy=(50.0, 90.0 + int(cell.seed)))
    collection, records = collect(table, Path("runs")), Records()
    data = records.table(collection)
    assert data["missing"] == 1
    assert [(row["id"], row["name"]) for row in data["rows"]] == [
        ("allreduce", "AllReduce, complete"),
        ("accumadam_aer", "AccumAdam, aer"),
    ]
    assert "seed=K" in data["rows"][1]["commands"][0]
    places = [(run["row"], run["seed"]) for run in data["runs"]]
    assert places == [(0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    accuracy = data["quantities"].index("accuracy")
    assert [run["values"][accuracy] for run in data["runs"]] == [92, 93, 91, 92, 93]
    grid, values = data["runs"][0]["curves"]["accuracy"]
    assert (records.grids.kept[grid]["steps"], values) == ([15, 30], [50, 92])
    # 120 kB of 4 workers in 30 steps; 30 kB each. Times are predicted: the synthetic runs are simulated.
    assert records.grids.kept[grid]["megabytes"] == 0.001
    assert not any(run["measured"] for run in data["runs"])
    assert records.commits.kept[data["runs"][0]["commit"]].startswith("0123456789ab")


@pytest.mark.slow
def test_rows_have_names_of_their_own_and_settings_that_differ():
    table = load_table("gpt2_gap")
    assert len({*names_of(table.rows)}) == len(table.rows)
    data = Records().table(collect(table, ROOT / "results" / "runs"))
    settings = {row["id"]: row["settings"][0] for row in data["rows"]}
    one, other = settings["dadam_b95_lr057"], settings["dadam_b95_lr057_unclipped"]
    assert {key for key in one | other if one.get(key) != other.get(key)} == {"training.clip"}
    assert one["optimizer.lr"] == 0.0057
    assert "data.name" not in one  # the same in all rows


def test_sweeps_are_what_their_files_say():
    table = load_table("table3_fair")
    sweep, tuned = sweep_of(table), read_tuned("table3_fair")
    assert [method["id"] for method in sweep["methods"]] == [*tuned.methods]
    trials = [(method, sweep["points"][point]["optimizer.lr"], value) for method, point, _, value in sweep["trials"]]
    for place, (name, of) in enumerate(tuned.methods.items()):
        rate = float(of.best.overrides[0].partition("=")[2])
        values = [value for method, tried, value in trials if (method, tried) == (place, rate)]
        assert np.mean(values) == pytest.approx(of.best.mean, rel=1e-5), name
        assert sum(method == place for method, *_ in trials) == of.trials
    assert sweep_of(load_table("steps_to_target")) is None  # tuned by another table
