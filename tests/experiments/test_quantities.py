"""Quantities of runs whose numbers the tests made up."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.quantities import QUANTITIES
from common.experiments.runs import RunError, read_run
from tests.experiments.conftest import make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")


@pytest.mark.parametrize(("losses", "epochs", "last"), [([9, 8, 7, 0.3, 0.2, 0.4], 2, 0.3), ([2, 1, 0.25], 30, 0.25)])
def test_training_loss_is_the_mean_over_the_last_epoch(tmp_path, losses, epochs, last):
    """6 rows in 2 epochs: rows 4, 5 and 6 lie in the second, row 3 ends the first; rows may be longer than an epoch."""
    run = read_run(write_run(tmp_path / "run", [], train_loss=losses, epochs=epochs))
    assert QUANTITIES["train_loss"].of(run) == pytest.approx(last)


def test_accuracies_of_the_mean_model_and_of_the_local_models():
    table = make_table(columns=["top1_mean", "top5_mean", "local_top1_mean", "local_top5"])
    metrics = {"accuracy_top5": 99.5, "local_accuracy": 88.0, "local_accuracy_top5": 98.25}
    for cell in table.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, metrics=metrics)
    found = collect(table, RUNS).frame[["top1", "top5", "local_top1", "local_top5"]]
    assert found.to_numpy().tolist() == [[90.0, 99.5, 88.0, 98.25]] * 6


def test_a_table_of_local_models_needs_runs_that_evaluated_them(table, caplog):
    for cell in table.cells(RUNS):
        write_run(cell.run_dir, cell.overrides)
    with pytest.raises(UsageError, match="no finished run"):
        collect(make_table(columns=["local_top1"]), RUNS)
    assert "metrics.jsonl records no 'local_accuracy'" in caplog.text


@pytest.mark.parametrize(
    ("column", "key"),
    [("learning_rate", "optimizer.lr"), ("decay_sum", "optimizer.weight_decay"), ("top1", "workers.kind")],
)
def test_a_configuration_without_a_key_makes_a_run_unusable(caplog, column, key):
    table = make_table(columns=[column])
    for cell in table.cells(RUNS):
        file = write_run(cell.run_dir, cell.overrides) / "config.yaml"
        with (file.parent / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 30, "split": "train", "lr": 0.1}\n')
        config = {"workers": {"kind": "simulated"}, "optimizer": {"lr": 0.1, "weight_decay": 0.1}}
        del config[key.split(".")[0]][key.split(".")[1]]
        file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="no finished run"):
        collect(table, RUNS)
    assert f"skipped runs/small/allreduce/seed_1: config.yaml: {key}: missing" in caplog.text


@pytest.mark.parametrize(("recorded", "decay"), [({}, 0.1 * 8.5), ({"decay_sum": 0.25}, 0.25)])
def test_clipped_steps_and_decay_are_summed_over_steps(tmp_path, recorded, decay):
    """Rows of 1, 3 and 2 steps; rates of 1, 1.33, 1.67, 2, 1.5 and 1."""
    run = read_run(write_run(tmp_path / "run", [], steps=6))
    assert QUANTITIES["clipped_fraction"].of(run) is None
    rows = [(1, 1.0, 0.5), (4, 2.0, 0.0), (6, 1.0, 1.0)]
    rows = [{"step": step, "split": "train", "lr": lr, "clipped_fraction": clipped} for step, lr, clipped in rows]
    config = {"optimizer": {"weight_decay": 0.1}}
    run = replace(run, rows=pa.Table.from_pylist(rows), config=config, summary=run.summary | recorded)
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


def test_scores_of_the_test_set_come_from_the_evaluation(tmp_path):
    run = read_run(write_run(tmp_path / "run", []))
    assert QUANTITIES["test_paper_bleu"].of(run) is None
    scores = run.folder / "evaluation" / "test.csv"
    scores.parent.mkdir()
    scores.write_text("model,step,paper_bleu\nbest,1,5\nlast,2,27.5\n")
    run = read_run(run.folder)
    assert QUANTITIES["test_paper_bleu"].of(run) == 27.5
    assert QUANTITIES["test_paper_meteor"].of(run) is None
    scores.write_text("model,step,paper_bleu\nbest,1,5\n")
    with pytest.raises(RunError, match=r"evaluation/test\.csv: no 'paper_bleu' of the last model"):
        QUANTITIES["test_paper_bleu"].of(read_run(run.folder))


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


def test_predicted_time_knows_rounds_and_fragments(tmp_path):
    run = read_run(write_run(tmp_path / "run", [], workers=8, topology={"name": "ring"}))
    times = []
    for rounds in ({}, {"local_steps": 6, "merge_after": 1}, {"local_steps": 6, "merge_after": 1, "fragments": 3}):
        run.config["parallel"] = {"method": "decentralized", "order": "awc", **rounds}
        times.append(QUANTITIES["predicted_step_ms"].of(run))
    assert times[0] > 1.1 * times[1] > 1.1 * 1.1 * times[2]  # a third of the bytes at a time


def test_predicted_time_knows_phases(tmp_path):
    run, times = read_run(write_run(tmp_path / "run", [], workers=8, topology={"name": "aer"})), {}
    run.config["workers"]["per_host"] = 2
    for phases in ("aligned", "staggered"):
        run.config["parallel"] = {"method": "decentralized", "order": "awc", "phases": phases}
        times[phases] = QUANTITIES["predicted_step_ms"].of(run)
    assert times["staggered"] < 0.9 * times["aligned"]


def test_predicted_time_needs_a_configuration(tmp_path):
    run = read_run(write_run(tmp_path / "run", []))
    for parallel in ({}, {"method": "sgp", "order": "awc"}):
        run.config["parallel"] = parallel
        with pytest.raises(RunError, match="no step time can be predicted"):
            QUANTITIES["predicted_step_ms"].of(run)
