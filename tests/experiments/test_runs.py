import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.experiments.runs import RunError, read_run
from common.record.run_folder import RunFolder
from tests.experiments.synthetic import write_run


def test_a_metric_or_number_that_was_not_recorded_is_named(tmp_path):
    run = read_run(write_run(tmp_path / "a", []))
    with pytest.raises(RunError, match=r"a: metrics\.jsonl records no 'bleu'"):
        run.last("validation", "bleu")
    with pytest.raises(RunError, match="no row with split 'test'"):
        run.last("test", "loss")
    with pytest.raises(RunError, match=r"summary\.json: energy=None: expected a number"):
        run.total("energy")


def cut_metrics(folder: Path):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-20])


def set_metrics(folder: Path, metric: str):
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "split": "train", {metric}}}')


def set_status(folder: Path, status: str):
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": status}))


DAMAGE = {
    "no summary.json": lambda folder: (folder / "summary.json").unlink(),
    "status 'interrupted' at step 30": lambda folder: set_status(folder, "interrupted"),
    "status 'failed' at step 30": lambda folder: set_status(folder, "failed"),
    "summary.json: Unterminated": lambda folder: (folder / "summary.json").write_text('{"status": "fini'),
    "summary.json: expected an object, got list": lambda folder: (folder / "summary.json").write_text("[]"),
    "environment.json: missing": lambda folder: (folder / "environment.json").unlink(),
    "config.yaml: missing": lambda folder: (folder / "config.yaml").unlink(),
    "config.yaml: while": lambda folder: (folder / "config.yaml").write_text("a: [1"),
    "metrics.jsonl, line 5: broken": cut_metrics,
    "line 1: broken (TypeError('loss: expected a number'))": lambda folder: set_metrics(folder, '"loss": "x"'),
    "line 1: broken (OverflowError": lambda folder: set_metrics(folder, '"step": 1e400'),
    "metrics.jsonl, line 1: broken (RecursionError": lambda folder: (folder / "metrics.jsonl").write_text("[" * 10**5),
    "summary.json: maximum recursion": lambda folder: (folder / "summary.json").write_text("[" * 10**5),
    "metrics.jsonl is empty": lambda folder: (folder / "metrics.jsonl").write_text(""),
    "metrics.jsonl: missing": lambda folder: (folder / "metrics.jsonl").unlink(),
}


def test_a_run_killed_while_it_fails_leaves_its_end_or_no_status():
    written = []
    folder = SimpleNamespace(_environment={}, _write_json=lambda name, content: written.append(name))
    RunFolder.fail(folder, RuntimeError("full"))
    assert written == ["environment.json", "summary.json"]


def test_an_unusable_run_is_named_with_the_reason(tmp_path):
    for reason, damage in DAMAGE.items():
        folder = write_run(tmp_path / "bad", [])
        assert read_run(folder).folder == folder
        damage(folder)
        with pytest.raises(RunError) as caught:
            read_run(folder)
        assert str(caught.value).startswith(f"{folder}: ")
        assert reason in str(caught.value)
    with pytest.raises(RunError, match="nowhere: no such folder"):
        read_run(tmp_path / "nowhere")
