"""Runs that are kept: what is packed, and read again."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.load import compare
from common.experiments.runs import METRICS, RUNS, RunError, read_run, read_scores
from scripts.keep import main
from scripts.lib.making import state_of
from tests.experiments.synthetic import write_run

KEPT = Path("kept/small")


def test_kept_runs_are_read_as_their_folders_are(registered):
    _, *others = registered.cells(Path("runs"))
    for cell in others:
        write_run(cell.run_dir, cell.overrides)
        (cell.run_dir / "checkpoints").mkdir()
        (cell.run_dir / "checkpoints" / "last.pt").write_bytes(b"weights")
    assert main(["table=small", "output=kept"]) == 0
    assert {file.name for file in KEPT.iterdir()} == {RUNS, METRICS}
    names = [json.loads(line)["run"] for line in (KEPT / RUNS).read_text().splitlines()]
    assert names == sorted(str(cell.run_dir.relative_to("runs/small")) for cell in others)
    assert len(collect(registered, Path("kept")).all_runs) == len(others)
    for cell in others:
        kept, run = read_run(Path("kept") / cell.run_dir.relative_to("runs")), read_run(cell.run_dir)
        assert (kept.config, kept.environment, kept.summary) == (run.config, run.environment, run.summary)
        pd.testing.assert_frame_equal(kept.metrics, run.metrics)
    assert compare([Path("kept")]).drop(columns="run").equals(compare([Path("runs")]).drop(columns="run"))
    assert [*compare([KEPT / "allreduce"])["run"]] == [f"{KEPT}/allreduce/seed_{seed}" for seed in (2, 3)]
    cells = list(registered.cells(Path("kept")))
    assert [state_of(registered, cell) for cell in cells] == ["missing"] + ["finished"] * 5
    with pytest.raises(RunError, match=r"kept/small/allreduce/seed_1: no such folder"):
        read_run(cells[0].run_dir)


def test_null_and_absent_metrics_and_whole_numbers_stay(registered):
    cell = next(registered.cells(Path("runs")))
    rows = [
        {"step": 31, "split": "train", "loss": 0.1 + 0.2, "epoch": 4.0, "bytes_sent": 2**60 + 1},
        {"step": 32, "split": "train", "loss": None, "epoch": 4.0, "bytes_sent": 5},
        {"step": 32, "split": "membership", "joined": [4, 5], "left": []},
        {"step": 32, "split": "validation", "accuracy": 1e-300, "consensus_distance": 3.5},
    ]
    with (write_run(cell.run_dir, cell.overrides) / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert main(["table=small", "output=kept"]) == 0
    kept = pq.read_table(KEPT / METRICS).drop_columns("run").to_pylist()[-4:]
    found = [{key: value for key, value in row.items() if value is not None} for row in kept]
    assert math.isnan(found[1].pop("loss"))
    assert found == [rows[0], {key: value for key, value in rows[1].items() if key != "loss"}, *rows[2:]]
    change = read_run(KEPT / "allreduce" / "seed_1").metrics.query("split == 'membership'").iloc[0]
    assert (change["joined"], change["left"]) == ([4, 5], [])


def test_further_seeds_join_those_that_are_kept(registered):
    cells = list(registered.cells(Path("runs")))[:3]
    for accuracy, made in ((50.0, cells[:2]), (60.0, cells[1:])):
        for cell in made:
            write_run(cell.run_dir, cell.overrides, accuracy=[accuracy])
        assert main(["table=small", "output=kept"]) == 0
        shutil.rmtree("runs")
    kept = [read_run(Path("kept") / cell.run_dir.relative_to("runs")) for cell in cells]
    assert [run.last("validation", "accuracy") for run in kept] == [50, 60, 60]


def test_scores_of_the_test_set_are_kept_and_those_of_an_earlier_run_do_not_stay(registered):
    cell = next(registered.cells(Path("runs")))
    scores = write_run(cell.run_dir, cell.overrides) / "evaluation" / "test.csv"
    scores.parent.mkdir()
    scores.write_text("model,bleu\nlast,1\n")
    for text in (scores.read_text(), None):
        assert main(["table=small", "output=kept"]) == 0
        assert read_scores(KEPT / "allreduce" / "seed_1") == text
        scores.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [(RUNS, '{"run": 1', r"runs\.jsonl, line 1: broken"), (METRICS, "", r"metrics\.parquet: ")],
)
def test_a_broken_pack_is_named(registered, capsys, file, text, reason):
    cell = next(registered.cells(Path("runs")))
    write_run(cell.run_dir, cell.overrides)
    assert main(["table=small", "output=kept"]) == 0
    (KEPT / file).write_text(text)
    with pytest.raises(UsageError, match=f"^{KEPT}/{reason}"):
        read_run(KEPT / "allreduce" / "seed_1")
    assert main(["table=small", "output=kept"]) == 2
    assert f"error: {KEPT / file}" in capsys.readouterr().err


def test_nothing_to_keep_is_an_error(registered):
    assert main(["table=small"]) == 2
