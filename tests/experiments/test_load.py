"""Runs as frames."""

import pytest

from common.experiments import load as module
from common.experiments.load import load
from tests.experiments.synthetic import write_run


def test_runs_and_metrics_of_a_table(table, monkeypatch):
    monkeypatch.setattr(module, "load_table", lambda name: table)
    for cell in table.cells(module.Path("mine")):
        write_run(cell.run_dir, cell.overrides, accuracy=[50.0, 90.0 + cell.seed])
    runs, metrics = load("small", "mine")
    assert runs.groupby(["row", "method"])["top1"].mean().to_dict() == {
        ("allreduce", "AllReduce"): 92.0,
        ("accumadam_aer", "AccumAdam"): 92.0,
    }
    assert runs["bytes_per_step"].tolist() == [1000] * 6
    assert runs["folder"][0] == "mine/small/allreduce/seed_1"
    assert runs["test_paper_bleu"].isna().all()  # no run has it
    assert list(metrics)[:5] == ["row", "variant", "seed", "step", "split"]
    assert len(metrics) == 6 * 5
    last = metrics.query("split == 'validation' and step == 30 and row == 'allreduce'")
    assert last.set_index("seed")["accuracy"].to_dict() == pytest.approx({1: 91, 2: 92, 3: 93})
