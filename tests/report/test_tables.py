import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from common.cli import UsageError
from common.local_steps import LocalSteps
from common.planner.steps import simulate_gossip
from common.report.collect import collect
from common.report.columns import DEFAULT_COLUMNS
from common.report.formats import readable
from common.report.quantities import QUANTITIES
from common.report.runs import RunError, read_run
from common.report.tables import build_table
from scripts.tables import main
from tests.report.conftest import make_table
from tests.report.synthetic import write_run

RUNS = Path("runs")


def fill(table, **row_values):
    """Writes every run; row_values: for each row a list of keyword arguments, one for each seed."""
    for cell in table.cells(RUNS):
        values = row_values.get(cell.row.name, [{}] * 3)[cell.seed - 1]
        write_run(cell.run_dir, cell.overrides, **values)


KEYS = ("accuracy", "train_loss", "consensus_distance", "bytes_sent", "time_step_ms")
ACCUMADAM = [
    dict(zip(KEYS, values, strict=True))
    for values in (
        ([10.0, 90.0], [2.0, 0.1], 0.2, 12_000, 5.0),
        ([20.0, 92.0], [2.0, 0.2], 0.3, 12_000, 6.0),
        ([99.0, 97.0], [2.0, 0.6], 0.7, 24_000, 10.0),
    )
]


def test_values_against_hand_computed_ones(table):
    fill(table, accumadam_aer=ACCUMADAM)
    frame = build_table(collect(table, RUNS))
    assert tuple(frame.columns) == tuple(name for name in DEFAULT_COLUMNS if "noise" not in name)  # not recorded
    row = frame.iloc[1]
    assert list(row[:4]) == ["AccumAdam", "aer", 4, 3]
    assert row["accuracy_mean"] == pytest.approx(93.0)
    assert row["accuracy_2sigma"] == pytest.approx(2 * 13**0.5)  # (9 + 1 + 16) / 2 = 13
    assert row["train_loss_mean"] == pytest.approx(0.3)
    assert row["consensus_distance_mean"] == pytest.approx(0.4)
    assert row["bytes_per_step"] == pytest.approx((100 + 100 + 200) / 3)  # 12,000 / 30 steps / 4 workers = 100
    assert row["time_step_ms"] == pytest.approx(7.0)


def test_columns_of_the_gradient_noise_are_shown_once_a_run_has_recorded_it(table):
    fill(table)
    for cell in list(table.cells(RUNS))[3:]:  # the second row's
        with (cell.run_dir / "metrics.jsonl").open("a") as file:
            for step, value in ((10, 9.0), (16, 0.1), (20, None), (25, 0.3), (30, 0.2 + cell.seed)):
                file.write(json.dumps({"step": step, "split": "train", "local_over_noise": value}) + "\n")
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert "global_over_noise_mean" not in frame.columns
    assert list(frame["local_over_noise_mean"]) == [None, pytest.approx(0.3)]  # the second half's medians
    assert list(readable(frame, collection.table)["local_over_noise_mean"]) == ["not recorded", "0.3"]


@pytest.mark.parametrize(("losses", "epochs", "last"), [([9, 8, 7, 0.3, 0.2, 0.4], 2, 0.3), ([2, 1, 0.25], 30, 0.25)])
def test_training_loss_is_the_mean_over_the_last_epoch(tmp_path, losses, epochs, last):
    """6 rows in 2 epochs: rows 4, 5 and 6 lie in the second, row 3 ends the first; rows may be longer than an epoch."""
    run = read_run(write_run(tmp_path / "run", [], train_loss=losses, epochs=epochs))
    assert QUANTITIES["train_loss"].of(run) == pytest.approx(last)


def test_accuracies_of_the_mean_model_and_of_the_local_models():
    table = make_table(columns=["top1_mean", "top5_mean", "local_top1_mean", "local_top5"])
    metrics = {"accuracy_top5": 99.5, "local_accuracy": 88.0, "local_accuracy_top5": 98.25}
    fill(table, **{row.name: [{"metrics": metrics}] * 3 for row in table.rows})
    assert list(build_table(collect(table, RUNS)).iloc[0]) == [90.0, 99.5, 88.0, 98.25]


def test_a_table_of_local_models_needs_runs_that_evaluated_them(table, caplog):
    fill(table)
    with pytest.raises(UsageError, match="no finished run"):
        collect(make_table(columns=["local_top1"]), RUNS)
    assert "metrics.jsonl records no 'local_accuracy'" in caplog.text


@pytest.mark.parametrize(("recorded", "decay"), [({}, 0.1 * 8.5), ({"decay_sum": 0.25}, 0.25)])
def test_clipped_steps_and_decay_are_summed_over_steps(tmp_path, recorded, decay):
    """Rows of 1, 3 and 2 steps; rates of 1, 1.33, 1.67, 2, 1.5 and 1."""
    run = read_run(write_run(tmp_path / "run", [], steps=6))
    assert QUANTITIES["clipped_fraction"].of(run) is None
    rows = [(1, 1.0, 0.5), (4, 2.0, 0.0), (6, 1.0, 1.0)]
    rows = [{"step": step, "split": "train", "lr": lr, "clipped_fraction": clipped} for step, lr, clipped in rows]
    config = {"optimizer": {"weight_decay": 0.1}}
    run = replace(run, metrics=pd.DataFrame(rows), config=config, summary=run.summary | recorded)
    assert QUANTITIES["clipped_fraction"].of(run) == pytest.approx(2.5 / 6)
    assert QUANTITIES["decay_sum"].of(run) == pytest.approx(decay)


@pytest.mark.parametrize(
    ("topology", "workers", "gap"),
    [
        ({"name": "complete"}, 4, 1),
        ({"name": "ring"}, 8, 1 - (1 + 2 * math.cos(2 * math.pi / 8)) / 3),
        ({"name": "static_exponential"}, 16, 2 / 5),
        ({"name": "one_peer_exponential"}, 8, 1),
        ({"name": "torus", "rows": 1}, 8, 1 - (1 + 2 * math.cos(2 * math.pi / 8)) / 3),
        ({"name": "random_matching", "seed": 3}, 4, 1 - (1 / 3) ** 0.5),
        ({"name": "aer"}, 4, 1),
    ],
)
def test_spectral_gap_is_that_of_the_runs_topology(tmp_path, topology, workers, gap):
    run = read_run(write_run(tmp_path / "run", [], topology=topology, workers=workers))
    assert QUANTITIES["spectral_gap"].of(run) == pytest.approx(gap)


@pytest.mark.parametrize("topology", [{"name": "hypercuboid"}, {"seed": 1}, {"name": "torus", "rows": 3}])
def test_a_topology_that_cannot_be_made_makes_a_run_unusable(tmp_path, topology):
    run = read_run(write_run(tmp_path / "run", [], topology=topology))
    with pytest.raises(RunError, match=r"config\.yaml: no topology can be made of it"):
        QUANTITIES["spectral_gap"].of(run)


def test_csv_and_markdown(registered, capsys):
    fill(registered, accumadam_aer=ACCUMADAM)
    assert main(["table=small"]) == 0
    lines = Path("runs/report/small.csv").read_text().splitlines()
    assert lines[0] == (
        "method,topology,workers,seeds,accuracy_mean,accuracy_2sigma,train_loss_mean,consensus_distance_mean,"
        "bytes_per_step,time_step_ms"
    )
    assert lines[1:] == [
        "AllReduce,complete,4,3,90,0,0.5,0.25,1000,10",
        "AccumAdam,aer,4,3,93,7.211102551,0.3,0.4,133.3333333,7",
    ]
    text = Path("runs/report/small.md").read_text()
    assert text.startswith("# A small table\n\nMade by a test.\n\n| method ")
    assert "| AccumAdam | aer        |         4 |       3 |             93.00 ± 7.21 |" in text
    for line in (
        "- `accuracy_mean`: final validation accuracy of the averaged model in percent; mean over seeds",
        "- Runs: 6 of 6 finished",
        "- Folder: runs",
        "- Hardware: Test CPU, 2 cores, no GPU",
        "- Software: python 3.11.7, torch 2.13.0",
        "- Date: 2026-01-02T03:04:05+00:00 (first start) to 2026-01-02T03:04:15+00:00 (last end)",
        "- Commit: 0123456789abcdef",
        "- Workers: kind=simulated, count=4, per_host=2",
        "- Evaluation: every=10, average=True",
        "- Made by `python -m scripts.tables table=small`",
        "seed=K run_dir=runs/small/allreduce/seed_K`",
    ):
        assert line in text
    assert "Missing" not in text
    assert "93.00 ± 7.21" in capsys.readouterr().out
    tex = Path("runs/report/small.tex").read_text()
    assert r"\caption{A small table}" in tex
    assert r"accuracy\_mean $\pm$ 2sigma" in tex
    assert r"93.00 $\pm$ 7.21" in tex


def test_missing_seeds_are_listed_with_their_commands(registered, capsys):
    cells = list(registered.cells(RUNS))
    write_run(cells[0].run_dir, cells[0].overrides, accuracy=[80.0])
    assert main(["table=small", "output=out"]) == 0
    lines = Path("out/small.csv").read_text().splitlines()
    assert lines[1] == "AllReduce,complete,4,1,80,,0.5,0.25,1000,10"  # one seed has no deviation
    assert lines[2] == "AccumAdam,aer,,0,,,,,,"
    text = Path("out/small.md").read_text()
    assert "- Runs: 1 of 6 finished" in text
    assert f"- allreduce seed 2: not run yet. `{cells[1].command}`" in text
    assert text.count("not run yet") == 5
    out = capsys.readouterr().out
    assert (
        "missing: 5 runs, the first is allreduce seed 2: not run yet: python -m scripts.reproduce table=small\n" in out
    )
    assert out.count("missing: ") == 1
    write_run(cells[5].run_dir, cells[5].overrides, accuracy=[80.0], status="interrupted")
    assert main(["table=small", "output=out"]) == 0
    assert f"missing: accumadam_aer seed 3: not finished: status 'interrupted' at step 30: {cells[5].command}\n" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("columns", ["400", "60"])
def test_a_table_wider_than_the_terminal_is_turned(registered, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    fill(registered, accumadam_aer=ACCUMADAM)
    assert main(["table=small", "output=results/tables"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (["method", "AllReduce", "AccumAdam"] in rows) == (columns == "60")
    assert "`python -m scripts.tables table=small`" in Path("results/tables/small.md").read_text()  # wherever it is


def test_any_runs_side_by_side(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "240")
    write_run(Path("runs/cnn/a/lr=1"), ["seed=1", "optimizer.lr=1", "run_dir=x"], accuracy=[80.0])
    write_run(Path("runs/cnn/a/lr=2"), ["seed=1", "optimizer.lr=2", "topology=aer"], accuracy=[81.5])
    write_run(Path("runs/cnn/a/lr=3"), ["seed=1", "optimizer.lr=3"], status="interrupted")
    assert main(["runs=runs/cnn/a"]) == 0
    heading, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:5] == ["run", "optimizer.lr", "topology", "steps", "accuracy"]
    assert [(row[0], row[1], "81.5" in row) for row in rows] == [
        ("runs/cnn/a/lr=1", "1", False),
        ("runs/cnn/a/lr=2", "2", True),
    ]
    assert main(["runs=nowhere"]) == 2
    assert "runs=nowhere: expected finished runs" in capsys.readouterr().err


def test_unusable_runs_are_named_and_not_averaged_in(table, caplog):
    fill(table)
    cells = list(table.cells(RUNS))
    (cells[0].run_dir / "metrics.jsonl").write_text('{"step": 1')
    write_run(cells[1].run_dir, cells[1].overrides, status="interrupted", accuracy=[1.0])
    write_run(cells[3].run_dir, [*cells[3].overrides, "optimizer.lr=1"], accuracy=[1.0])
    write_run(cells[4].run_dir, cells[4].overrides, accuracy=[])
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert list(frame["seeds"]) == [1, 1]
    assert list(frame["accuracy_mean"]) == [90.0, 90.0]
    assert [missing.cell.label for missing in collection.missing] == [cells[i].label for i in (0, 1, 3, 4)]
    for cell, reason in [
        (cells[0], "metrics.jsonl, line 1: broken"),
        (cells[1], "not finished: status 'interrupted' at step 30"),
        (cells[3], "holds something else: optimizer.lr: 1 there, not set here"),
        (cells[4], "metrics.jsonl records no"),
    ]:
        assert f"skipped {cell.run_dir}: {reason}" in caplog.text


def test_a_diverged_run_shows_as_nan(registered):
    fill(registered, allreduce=[{}, {"train_loss": [2.0, float("nan")], "accuracy": [float("nan")]}, {}])
    assert main(["table=small"]) == 0
    row = Path("runs/report/small.csv").read_text().splitlines()[1]
    assert row == "AllReduce,complete,4,3,nan,nan,nan,0.25,1000,10"


def test_origins_that_differ_are_counted(registered):
    fill(registered)
    path = next(registered.cells(RUNS)).run_dir / "environment.json"
    environment = json.loads(path.read_text())
    environment |= {"git_dirty": True, "hardware": {"cpu": "Other", "cores": 16, "gpus": ["H100", "H100"]}}
    path.write_text(json.dumps(environment))
    assert main(["table=small"]) == 0
    text = Path("runs/report/small.md").read_text()
    assert "- Hardware: Other, 16 cores, 2 x H100 (1 of 6 runs); Test CPU, 2 cores, no GPU (5 of 6 runs)" in text
    assert "0123456789abcdef with uncommitted changes (1 of 6 runs); 0123456789abcdef (5 of 6 runs)" in text


def test_without_any_run_nothing_is_overwritten(registered, capsys):
    assert main(["table=small", "runs=no where"]) == 2
    assert not Path("runs").exists()
    error = capsys.readouterr().err
    assert "no finished run in no where/small" in error
    assert "python -m scripts.reproduce table=small 'runs=no where'" in error


def test_variants_have_columns_of_their_own():
    variants = {"de": ["data=digits"], "fr": ["data=other"]}
    columns = ["method", "workers", "seeds", "de_accuracy_mean", "fr_accuracy_mean", "fr_accuracy_2sigma"]
    table = make_table(variants=variants, columns=columns)
    for cell in table.cells(RUNS):
        final = {"de": 50.0, "fr": 70.0}[cell.variant] + cell.seed
        if (cell.row.name, cell.variant, cell.seed) != ("allreduce", "fr", 3):
            write_run(cell.run_dir, cell.overrides, accuracy=[1.0, final])
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert list(frame.iloc[0]) == ["AllReduce", 4, "3/2", 52.0, 71.5, pytest.approx(2**0.5)]
    assert list(frame.iloc[1]) == ["AccumAdam", 4, 3, 52.0, 72.0, pytest.approx(2.0)]
    assert [missing.cell.label for missing in collection.missing] == ["allreduce fr seed 3"]
    de, fr = collection.by_variant()
    assert (len(de.all_runs), len(fr.all_runs), fr.table.name) == (6, 5, "small_fr")


def test_meteor_may_be_missing():
    """Not the mean of two beside seeds = 3: where a run has none, the row has none."""
    table = make_table(columns=["method", "seeds", "meteor_mean", "meteor_2sigma"])
    for cell in table.cells(RUNS):
        scored = cell.row.name == "allreduce" or cell.seed == 1
        write_run(cell.run_dir, cell.overrides, metrics={"meteor": 0.5} if scored else {})
    frame = build_table(collect(table, RUNS))
    assert frame["meteor_mean"].tolist() == [0.5, None]
    assert readable(frame, table)["meteor_mean ± 2sigma"].tolist() == ["0.5000 ± 0.0000", "missing"]


@pytest.fixture
def published(monkeypatch):
    """The small table with the numbers of Table 3 beside its rows."""
    columns = ["method", "workers", "seeds", "top1_mean", "top1_2sigma", "top1_published"]
    table = make_table(published=["table3"], columns=columns)
    monkeypatch.setattr("scripts.tables.load_table", lambda *_, **__: table)
    return table


def test_published_values_stand_beside_ours(published):
    fill(published)
    assert build_table(collect(published, RUNS))["top1_published"].tolist() == [76.01, 76.54]


def test_published_numbers_are_shown_without_any_run(published, capsys):
    assert main(["table=small"]) == 0
    lines = Path("runs/report/small.csv").read_text().splitlines()
    assert lines[1:] == ["AllReduce,,0,,,76.01", "AccumAdam,,0,,,76.54"]
    text = Path("runs/report/small.md").read_text()
    assert "- Table 3: ResNet-50 on ImageNet-1K. From Promise to Practice" in text
    assert "76.54" in capsys.readouterr().out
    assert text.count("not run yet. `python -m cnn.train") == 6


def test_a_mistyped_folder_replaces_no_table(published, capsys):
    assert main(["table=small", "runs=rusn"]) == 2
    assert "no finished run in rusn/small" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_several_folders_fill_one_another(registered, capsys):
    """Seed 1 from one's own folder, where it is in both; seed 2 from the kept ones; seed 3 from nowhere."""
    cell = next(registered.cells(Path("runs")))
    write_run(cell.run_dir, cell.overrides, accuracy=[70.0])
    for kept, accuracy in zip(list(registered.cells(Path("kept")))[:2], (10.0, 80.0), strict=True):
        write_run(kept.run_dir, kept.overrides, accuracy=[accuracy])
    assert main(["table=small", "runs=[runs,kept]"]) == 0
    assert Path("runs/report/small.csv").read_text().splitlines()[1].startswith("AllReduce,complete,4,2,75,")
    text = Path("runs/report/small.md").read_text()
    assert "- Folder: runs (1 of 2 runs); kept (1 of 2 runs)" in text
    assert "- Made by `python -m scripts.tables table=small 'runs=[runs,kept]'`" in text
    assert "allreduce seed 3: not run yet. `python -m cnn.train" in text


def test_scores_of_the_test_set_come_from_the_evaluation(tmp_path):
    run = read_run(write_run(tmp_path / "run", []))
    assert QUANTITIES["test_paper_bleu"].of(run) is None
    (run.folder / "evaluation").mkdir()
    (run.folder / "evaluation" / "test.csv").write_text("model,step,paper_bleu\nbest,1,5\nlast,2,27.5\n")
    assert QUANTITIES["test_paper_bleu"].of(run) == 27.5
    assert QUANTITIES["test_paper_meteor"].of(run) is None
    (run.folder / "evaluation" / "test.csv").write_text("model,step,paper_bleu\nbest,1,5\n")
    with pytest.raises(RunError, match=r"evaluation/test\.csv: no 'paper_bleu' of the last model"):
        QUANTITIES["test_paper_bleu"].of(run)


def test_runs_without_scores_of_the_test_set_are_listed_with_the_command(monkeypatch, capsys):
    table = make_table(columns=["method", "seeds", "test_paper_bleu_mean"], task="transformer")
    monkeypatch.setattr("scripts.tables.load_table", lambda *_, **__: table)
    for cell in table.cells(RUNS):
        run = write_run(cell.run_dir, cell.overrides, environment={"command": "python -m transformer.train"})
        if (cell.row.name, cell.seed) != ("allreduce", 2):
            (run / "evaluation").mkdir()
            (run / "evaluation" / "test.csv").write_text(f"model,paper_bleu\nlast,{20 + cell.seed}\n")
    assert main(["table=small"]) == 0
    command = "python -m transformer.evaluate run=runs/small/allreduce/seed_2 models=last"
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert missing == [f"missing: runs/small/allreduce/seed_2: no scores of the test set: {command}"]
    text = Path("runs/report/small.md").read_text()
    assert f"- runs/small/allreduce/seed_2: no scores of the test set. `{command}`" in text
    assert Path("runs/report/small.csv").read_text().splitlines()[1:] == ["AllReduce,3,", "AccumAdam,3,22"]


@pytest.mark.parametrize("bucket_mb", [25.0, 1000.0])
def test_predicted_time_of_allreduce_is_between_its_parts_and_their_sum(tmp_path, bucket_mb):
    """65 M parameters leave every host once: 2 x 15/16 x 260 MB at 25 Gbit/s; one bucket overlaps with nothing."""
    run = read_run(write_run(tmp_path / "run", [], workers=16))
    run.config["parallel"] = {"method": "allreduce", "bucket_mb": bucket_mb}
    run.config["workers"]["per_host"] = 4
    wire = 2 * 15 / 16 * 260 * 8 / 25 + 2 * 15 * 0.02  # latencies of one bucket
    predicted = QUANTITIES["predicted_step_ms"].of(run)
    if bucket_mb == 1000:
        assert wire + 60 < predicted < wire + 60 * 1.2  # the slowest of 16 with a deviation of 5 %
    else:
        assert wire < predicted < wire + 60


def test_predicted_time_counts_the_momentum_that_dmsgd_sends(tmp_path):
    """Two hosts of one worker exchange 260 MB at 25 Gbit/s after computing; mixed momentum travels before them."""
    run = read_run(write_run(tmp_path / "run", [], workers=2, topology={"name": "complete"}))
    run.config["workers"]["per_host"] = 1
    run.config["parallel"] = {"method": "decentralized", "order": "atc"}
    predicted = {}
    for optimizer in (
        {"name": "sgd"},
        {"name": "dmsgd", "momentum_mixing": False},
        {"name": "dmsgd", "momentum_mixing": True},
        {"name": "qg_dmsgd"},
    ):
        run.config["optimizer"] = optimizer
        predicted[tuple(optimizer.values())] = QUANTITIES["predicted_step_ms"].of(run)
    parameters = predicted.pop(("sgd",))
    message = 260 * 8 / 25
    assert 60 + message < parameters < 60 * 1.2 + message
    assert predicted.pop(("dmsgd", True)) == pytest.approx(parameters + message, rel=0.01)
    assert predicted == {("dmsgd", False): parameters, ("qg_dmsgd",): parameters}  # they send parameters alone


def test_predicted_time_knows_rounds_and_fragments(tmp_path, monkeypatch):
    run = read_run(write_run(tmp_path / "run", [], workers=8, topology={"name": "ring"}))
    plans = []
    monkeypatch.setattr(
        "common.report.prediction.simulate_gossip",
        lambda *a, local, **k: plans.append(local) or simulate_gossip(*a, local=local, **k),
    )
    times = []
    for fragments in (1, 3):
        rounds = {"local_steps": 6, "merge_after": 1, "fragments": fragments}
        run.config["parallel"] = {"method": "decentralized", "order": "awc", **rounds}
        times.append(QUANTITIES["predicted_step_ms"].of(run))
    assert plans == [LocalSteps(6, 1, fragments=1), LocalSteps(6, 1, fragments=3)]
    assert times[0] > 1.1 * times[1]  # a third of the bytes at a time


def test_predicted_time_needs_a_configuration(tmp_path):
    run = read_run(write_run(tmp_path / "run", []))
    for parallel in ({}, {"method": "sgp", "order": "awc"}):
        run.config["parallel"] = parallel
        with pytest.raises(RunError, match="no step time can be predicted"):
            QUANTITIES["predicted_step_ms"].of(run)
