"""Tuning: equal trials for all methods, what is chosen, and that the table's rows take it."""

import json
import re
import shlex
import sys
import types
from math import log2
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread
from omegaconf import OmegaConf

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.definitions import ROOT, meaning
from common.experiments.sweeps import read_tuned
from common.experiments.tables import load_table
from common.experiments.trials import methods_of, read_trials
from common.report.sweep_files import tuned_text
from common.report.tables import mark, missing_summary
from scripts.reproduce import main as reproduce
from scripts.sweep import main as sweep
from scripts.tables import main as tables
from tests.experiments.synthetic import write_run
from tests.naming import case

SMALL = [
    "workers=simulated", "workers.count=2", "training.steps=3", "training.batch_size=16", "model.width=2",
    "schedule.warmup=0", "logging.every=1",
]  # fmt: skip
CONTENT = {
    "title": "A small table",
    "task": "cnn",
    "seeds": [1, 2],
    "overrides": SMALL,
    "sweep": {"quantity": "accuracy", "best": "highest", "seeds": [7, 8], "rates": 3, "extensions": 2},
    "rows": [
        {
            "name": "allreduce",
            "method": "AllReduce",
            "topology": "complete",
            "overrides": ["parallel=allreduce", "optimizer=adam"],
            "centre": 0.01,
        },
        {
            "name": "dadam",
            "method": "DAdam",
            "topology": "complete",
            "overrides": ["parallel=decentralized", "topology=complete", "optimizer=adam"],
            "centre": 0.04,
        },
        {
            "name": "dadam_ring",
            "method": "DAdam",
            "topology": "ring",
            "overrides": ["parallel=decentralized", "topology=ring", "optimizer=adam"],
            "tuned_with": "dadam",
        },
    ],
}
FIXED = {
    "name": "fixed",
    "method": "AllReduce, published rate",
    "topology": "complete",
    "overrides": ["parallel=allreduce", "optimizer=adam", "optimizer.lr=0.02"],
}
DEFINITIONS, SWEEPS = Path("definitions"), Path("results/sweeps")


def define(**changes) -> None:
    """Write the table's definition, with other values of some keys; those of `sweep` are added to it."""
    changes["sweep"] = CONTENT["sweep"] | changes.get("sweep", {})
    DEFINITIONS.mkdir(exist_ok=True)
    OmegaConf.save(CONTENT | changes, DEFINITIONS / "small.yaml")


def load(name, *_, **__):
    return load_table(name, folder=DEFINITIONS, sweeps=SWEEPS)


@pytest.fixture(autouse=True)
def definition(in_an_empty_folder, monkeypatch) -> None:
    define()
    for script in ("sweep", "reproduce", "tables"):
        monkeypatch.setattr(f"scripts.{script}.load_table", load)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Sweeps without their figure, which takes longer than all else."""
    monkeypatch.setattr("common.report.sweep_files.save", lambda *_: [])


@pytest.fixture
def launched(monkeypatch):
    """A launch that writes a run at once; returns the list of its settings.

    `accuracy(settings)` may be replaced: None is a run that diverges, an exception one that fails.
    """

    def launch(task, overrides):
        settings = meaning(overrides)
        module.calls.append(settings)
        accuracy = module.accuracy(settings)
        folder = Path(settings["run_dir"])
        write_run(folder, overrides, accuracy=[accuracy or 0], status="failed" if accuracy is None else "finished")
        if accuracy is None:
            error = "DivergedError: training loss nan at step 12 on worker 0"
            (folder / "summary.json").write_text(json.dumps({"status": "failed", "error": error}))
        return int(accuracy is None)

    module = types.ModuleType("common.launch.processes")
    module.launch, module.calls, module.accuracy = launch, [], peaks(allreduce=0.01, dadam=0.04)
    monkeypatch.setitem(sys.modules, "common.launch.processes", module)
    return module


def peaks(**best):
    """Return an accuracy that falls by a percent for each factor of 2 from the rate that is best for a row."""

    def accuracy(settings):
        row = Path(settings["run_dir"]).parts[3]
        return 90 - abs(log2(settings["optimizer.lr"] / best[row])) + settings["seed"] / 100

    return accuracy


def tuned(method: str):
    return read_tuned("small", SWEEPS).methods[method]


def records() -> pd.DataFrame:
    return pd.read_csv(SWEEPS / "small.csv")


def test_every_method_gets_the_same_trials_and_the_best_is_kept(launched, capsys):
    assert sweep(["table=small"]) == 0
    frame = records()
    assert frame.groupby("row").size().to_dict() == {"allreduce": 6, "dadam": 6}
    assert list(frame.columns) == [
        "row", "optimizer.lr", "seed", "accuracy", "status", "steps", "seconds", "commit", "hardware", "date",
    ]  # fmt: skip
    assert list(frame["optimizer.lr"][:6]) == [0.01, 0.01, 0.005, 0.005, 0.02, 0.02]  # from the centre outwards
    assert set(frame["seed"]) == {7, 8}
    assert (frame.iloc[0]["steps"], frame.iloc[0]["seconds"], frame.iloc[0]["commit"]) == (30, 10, "0123456789abcdef")
    best = tuned("dadam")
    assert (best.best.overrides, best.best.mean) == (("optimizer.lr=0.04",), pytest.approx(90.075))
    assert (best.runner_up.overrides, best.runner_up.mean) == (("optimizer.lr=0.02",), pytest.approx(89.075))
    assert (best.trials, best.diverged, best.edge) == (6, 0, None)
    assert launched.calls[0]["run_dir"] == "runs/sweeps/small/allreduce/lr_0.01/seed_7"
    page = (SWEEPS / "small.md").read_text()
    assert "| DAdam | complete | 6 | 0 | optimizer.lr=0.04 | 90.07 |" in page
    assert "dadam, dadam_ring |" in page
    assert "12 in [small.csv](small.csv)" in page
    assert imread(SWEEPS / "small.png").std() > 0.05
    assert "written: results/sweeps/small.csv" in capsys.readouterr().out


def test_the_grid_grows_for_all_methods_while_one_is_best_at_an_edge_but_not_for_ever(undrawn, launched):
    launched.accuracy = peaks(allreduce=0.0025, dadam=1e3)
    assert sweep(["table=small"]) == 0
    rates = records().groupby("row")["optimizer.lr"].unique().map(sorted).to_dict()
    assert rates == {
        "allreduce": [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08],
        "dadam": [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32],
    }
    assert (tuned("allreduce").best.overrides, tuned("allreduce").edge) == (("optimizer.lr=0.0025",), None)
    assert tuned("dadam").edge == "highest"
    assert "| highest | dadam" in (SWEEPS / "small.md").read_text()
    table = load("small")
    assert [mark(table, row, table.numbers[0]) for row in table.rows] == ["", " (edge)", " (inherited, edge)"]


def test_a_trial_that_diverged_is_the_worst_and_not_made_again(undrawn, launched, capsys):
    launched.accuracy = lambda settings: None if settings["optimizer.lr"] > 0.015 else 1
    define(rows=CONTENT["rows"][:1], sweep={"extensions": 0})
    assert sweep(["table=small"]) == 0
    assert "allreduce/lr_0.02 seed 7   diverged" in capsys.readouterr().out
    frame = records()
    assert list(frame["status"]) == ["finished"] * 4 + ["diverged"] * 2
    assert list(frame["accuracy"].isna()) == [False] * 4 + [True] * 2
    assert list(frame["steps"]) == [30] * 4 + [12] * 2
    assert (tuned("allreduce").diverged, tuned("allreduce").edge) == (2, None)
    launched.calls.clear()
    killed = Path("runs/sweeps/small/allreduce/lr_0.02/seed_7/environment.json")
    killed.write_text(json.dumps(json.loads(killed.read_text()) | {"end": None}))
    assert sweep(["table=small"]) == 0
    assert launched.calls == []
    assert records()["seconds"].isna().sum() == 1


def test_where_all_diverge_lower_rates_are_tried_and_none_is_chosen(launched, capsys):
    launched.accuracy = lambda settings: None
    define(rows=CONTENT["rows"][:1])
    assert sweep(["table=small"]) == 2
    assert min(call["optimizer.lr"] for call in launched.calls) == 0.00125
    assert "allreduce: every trial diverged; expected a lower centre than 0.01" in capsys.readouterr().err
    assert not SWEEPS.exists()


def test_a_trial_that_failed_fails_the_command(launched, capsys):
    def accuracy(settings):
        if settings["optimizer.lr"] == 0.005:
            raise RuntimeError("no space left")
        return 1

    launched.accuracy = accuracy
    assert sweep(["table=small"]) == 1
    assert "failed: allreduce/lr_0.005 seed 7: RuntimeError: no space left" in capsys.readouterr().err
    assert len(launched.calls) == 12
    assert not SWEEPS.exists()


def test_an_interruption_stops_and_the_same_command_continues(undrawn, launched, capsys):
    usual = launched.accuracy

    def interrupted(settings):
        if len(launched.calls) == 5:
            raise KeyboardInterrupt
        return usual(settings)

    launched.accuracy = interrupted
    assert sweep(["table=small"]) == 75
    assert "to continue: python -m scripts.sweep table=small\n" in capsys.readouterr().err
    launched.accuracy = usual
    assert sweep(["table=small"]) == 0
    assert len(launched.calls) == 5 + 8
    assert len(records()) == 12


def test_a_dry_run_prints_what_would_run_and_runs_nothing(undrawn, launched, capsys):
    assert sweep(["table=small", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# methods: 2, points: 3, seeds: 2; extensions of the grid: at most 2\n")
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert len(commands) == 12
    assert commands[0][:3] == ["python", "-m", "cnn.train"]
    assert commands[0][-3:] == ["optimizer.lr=0.01", "seed=7", "run_dir=runs/sweeps/small/allreduce/lr_0.01/seed_7"]
    assert launched.calls == []
    assert sweep(["table=small"]) == 0
    (SWEEPS / "small.yaml").unlink()
    capsys.readouterr()
    assert sweep(["table=small", "--dry-run"]) == 0
    assert "nothing is missing" in capsys.readouterr().out
    assert not (SWEEPS / "small.yaml").exists()


def test_rows_take_what_was_chosen_and_runs_with_other_values_are_refused(undrawn, launched, capsys):
    for command in (reproduce, tables):
        assert command(["table=small"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: small is not tuned yet: results/sweeps/small.yaml is missing; make it with: ")
        assert error.endswith("python -m scripts.sweep table=small\n")
    assert launched.calls == []
    assert sweep(["table=small"]) == 0
    launched.calls.clear()
    launched.accuracy = lambda settings: 90
    assert reproduce(["table=small"]) == 0
    assert [call["optimizer.lr"] for call in launched.calls] == [0.01, 0.04, 0.04] * 2
    assert tables(["table=small"]) == 0
    page = Path("runs/report/small.md").read_text()
    assert "- Tuned: dadam: optimizer.lr=0.04, accuracy 90.07 on seeds that are not reported, best of 6 trials" in page
    assert "- Trials: results/sweeps/small.md and .csv, made by `python -m scripts.sweep table=small`" in page
    chosen = SWEEPS / "small.yaml"
    chosen.write_text(chosen.read_text().replace("optimizer.lr=0.04", "optimizer.lr=0.02", 1))
    capsys.readouterr()
    assert reproduce(["table=small"]) == 2
    assert "holds something else: optimizer.lr: 0.04 there, 0.02 here" in capsys.readouterr().err


def test_what_was_chosen_for_another_definition_is_refused(undrawn, launched):
    assert sweep(["table=small"]) == 0
    assert load("small").untuned is None
    changed = [CONTENT["rows"][0] | {"centre": 0.02}, *CONTENT["rows"][1:]]
    for changes, what in (
        ({"sweep": {"rates": 4}}, "sweep"),
        ({"rows": changed}, "allreduce"),
        ({"overrides": [*SMALL, "data.label_noise=0.1"]}, "allreduce, dadam"),
    ):
        with case(what):
            define(**changes)
            assert f"was made by another definition of {what}; make it again with: " in load("small").untuned
    kept = SWEEPS / "small.yaml"
    for content, mistake in (
        ("sweep: {}", "missing"),
        (kept.read_text().replace("rates: 3", "rates: 3\n  choices: {}"), "sweep.choices: unknown key"),  # older
    ):
        with case(mistake):
            kept.write_text(content)
            again = "remove this file and make it again with: python -m scripts.sweep table=small"
            with pytest.raises(UsageError, match=rf"small\.yaml: .*{mistake}.*; {again}"):
                load("small")


def test_variants_are_tuned_for_each_method(undrawn, launched):
    variants = {"noisy": ["data.label_noise=0.2"], "clean": ["data.label_noise=0"]}
    columns = ["method", "noisy_accuracy", "learning_rate"]
    define(sweep={"extensions": 0}, variants=variants, columns=columns)
    best = {0.2: 0.02, 0: 0.01}
    launched.accuracy = lambda settings: 80 - abs(log2(settings["optimizer.lr"] / best[settings["data.label_noise"]]))
    assert sweep(["table=small"]) == 0
    assert set(records().groupby(["row", "variant"]).size()) == {6}
    table = load("small")
    chosen = {name: {table.tuned_overrides(row, name) for row in table.rows} for name in variants}
    assert chosen == {"noisy": {("optimizer.lr=0.02",)}, "clean": {("optimizer.lr=0.01",), ("optimizer.lr=0.02",)}}
    assert [mark(table, row, table.numbers[1]) for row in table.rows] == [""] * 3  # of several sweeps
    assert launched.calls[0]["run_dir"] == "runs/sweeps/small/allreduce/lr_0.01/noisy/seed_7"


def test_a_parabola_is_fitted_and_the_fit_is_kept(launched):
    """Seeds move the level, and rates above 0.05 diverge; the optimum lies between the rates."""
    define(
        sweep={"fit": 3, "seeds": [7, 8, 9], "extensions": 0}, columns=["method", "learning_rate_mean", "accuracy_mean"]
    )
    best = {"allreduce": 0.012, "dadam": 0.035}

    def accuracy(settings):
        rate, row = settings["optimizer.lr"], Path(settings["run_dir"]).parts[3]
        return None if rate > 0.05 else 90 - log2(rate / best[row]) ** 2 + settings["seed"] / 10

    launched.accuracy = accuracy
    assert sweep(["table=small"]) == 0
    assert records().groupby("row").size().to_dict() == {"allreduce": 9, "dadam": 9}
    found = tuned("allreduce")
    assert (found.best.overrides, found.best.mean) == (("optimizer.lr=0.012",), pytest.approx(90.8))
    assert found.interval == (pytest.approx(0.012), pytest.approx(0.012))
    assert (found.scatter, found.edge, found.runner_up) == (pytest.approx(0, abs=1e-9), None, None)
    near = tuned("dadam")  # the rate above its best diverged, so that two are left: no parabola, but a point
    assert (near.best.overrides, near.interval, near.diverged) == (("optimizer.lr=0.04",), None, 3)
    assert near.runner_up is None
    table = load("small")
    assert table.untuned is None
    (column,) = [column for column in table.numbers if column.quantity.name == "learning_rate"]
    assert [mark(table, row, column) for row in table.rows] == ["", "", " (inherited)"]
    page = (SWEEPS / "small.md").read_text()
    assert "0.012 to 0.012 |" in page
    assert " none |" in page


def test_a_row_that_has_its_own_rate_is_not_tuned(undrawn, launched) -> None:
    define(rows=[*CONTENT["rows"], FIXED])
    assert sweep(["table=small"]) == 0
    assert {Path(call["run_dir"]).parts[3] for call in launched.calls} == {"allreduce", "dadam"}
    launched.calls.clear()
    launched.accuracy = lambda settings: 90
    assert reproduce(["table=small", "rows=fixed"]) == 0
    assert [call["optimizer.lr"] for call in launched.calls] == [0.02] * 2


def test_values_that_another_table_tuned():
    rows = [CONTENT["rows"][0] | {"centre": None, "tuned_with": "allreduce"}, CONTENT["rows"][2] | {"tuned_with": None}]
    content = {key: value for key, value in CONTENT.items() if key != "sweep"} | {"tuned_by": "table3_fair"}

    def table(name="allreduce", **options):
        OmegaConf.save(content | {"rows": [rows[0] | {"tuned_with": name}, rows[1]]}, DEFINITIONS / "small.yaml")
        return load_table("small", folder=DEFINITIONS, **options)

    assert table().untuned is None
    first, *_, last = table().cells(Path("runs"))
    assert "optimizer.lr=0.002" in first.overrides
    assert not any(text.startswith("optimizer.lr") for text in last.overrides)
    assert table("alreduce").untuned == "results/sweeps/table3_fair.yaml: has no alreduce"
    assert table(sweeps=SWEEPS).untuned.startswith("table3_fair is not tuned yet: results/sweeps/table3_fair.yaml is")
    (line,) = missing_summary(collect(table(sweeps=SWEEPS), Path("runs"), allow_empty=True))
    assert line.endswith("python -m scripts.sweep table=table3_fair")
    kept = (ROOT / "results/sweeps/table3_fair.yaml").read_text()
    SWEEPS.mkdir(parents=True)
    (SWEEPS / "table3_fair.yaml").write_text(kept.replace("centre: ", "centre: 1", 1))
    assert "table3_fair.yaml was made by another definition of allreduce; " in table(sweeps=SWEEPS).untuned
    content["tuned_by"] = "steps_to_target"
    with pytest.raises(UsageError, match="tuned_by=steps_to_target: expected a table with a sweep"):
        table()


def test_a_wrong_sweep_is_refused(capsys):
    rows = CONTENT["rows"]
    for message, changes in {
        "sweep.seeds: expected none that the table reports, got 2": {"sweep": {"seeds": [2, 9]}},
        "quantity='accurracy': did you mean 'accuracy'?": {"sweep": {"quantity": "accurracy"}},
        "expected one of the validation set": {"sweep": {"quantity": "test_paper_bleu"}},
        "sweep.rates=2: expected greater than or equal to 3": {"sweep": {"rates": 2}},
        "row 'dadam': expected either centre, tuned_with, or overrides of optimizer.lr": {
            "rows": [rows[0], rows[1] | {"tuned_with": "allreduce"}]
        },
        "tuned_with='dadan': did you mean 'dadam'?": {"rows": [*rows[:2], rows[2] | {"tuned_with": "dadan"}]},
        "expected each once, got optimizer.lr more than once": {"overrides": [*SMALL, "optimizer.lr=1"]},
        "best=lowest: expected highest": {"sweep": {"best": "lowest"}},
        "sweep.quantity=top5: expected what the table reports, accuracy, ": {"sweep": {"quantity": "top5"}},
        "fit=3: expected at least 3 seeds, got 2": {"sweep": {"fit": 3}},
        "fit=5: expected at least as many rates, got 3": {"sweep": {"fit": 5, "seeds": [7, 8, 9]}},
    }.items():
        with case(message):
            define(**changes)
            assert sweep(["table=small"]) == 2
            assert message in capsys.readouterr().err
    content = {key: value for key, value in CONTENT.items() if key != "sweep"}
    OmegaConf.save(content, DEFINITIONS / "small.yaml")
    assert sweep(["table=small"]) == 2
    assert "centre and tuned_with: expected in a table with a sweep only" in capsys.readouterr().err
    OmegaConf.save(content | {"rows": [rows[0] | {"centre": None}]}, DEFINITIONS / "small.yaml")
    assert sweep(["table=small"]) == 2
    assert "table=small: has no sweep" in capsys.readouterr().err


def test_kept_rates_belong_to_their_definitions_and_choosing_again_from_their_trials_changes_nothing(monkeypatch):
    for file in (Path(__file__).parents[2] / "results" / "sweeps").glob("*.yaml"):
        with case(file.stem):
            table, frame = load_table(file.stem), pd.read_csv(file.with_suffix(".csv"))
            assert table.untuned is None
            assert len(set(frame.groupby("row").size())) == 1
            assert sum(method.trials for method in table.tuned.methods.values()) == len(frame)
            assert tuned_text(table.tuned, re.search(r"`(.*)`", file.read_text())[1]) == file.read_text()
            places = ["row", *(["variant"] if table.variants else []), "optimizer.lr", "seed"]
            values = frame.set_index(places)[table.sweep.quantity]

            def read(_, cell, values=values):
                row, _, rate = cell.row.name.partition("/lr_")
                return {"value": values[(row, *([cell.variant] if cell.variant else []), float(rate), cell.seed)]}

            monkeypatch.setattr("common.experiments.trials._read", read)
            rates = frame.groupby("row")["optimizer.lr"].unique()
            exponents = {round(log2(r / row.centre)) for row in table.tuned_rows for r in rates[row.name]}
            grid = range(min(exponents), max(exponents) + 1)
            for method in methods_of(table, grid, read_trials(table, grid, Path("runs"))):
                made, kept = method.tuned, table.tuned.methods[method.name]
                assert (made.trials, made.diverged) == (kept.trials, kept.diverged)
                assert made.best.mean == pytest.approx(kept.best.mean, rel=1e-9)
                other = kept.runner_up  # none where a parabola chooses
                if other is None or kept.best.mean != pytest.approx(other.mean, rel=1e-9):  # files hold ten digits
                    assert (made.best.overrides, made.edge) == (kept.best.overrides, kept.edge)
