"""Whole runs: in real processes that share a replica, and going on in the middle of an epoch."""

from pathlib import Path
from typing import Any

import pytest

from common.launch.processes import launch
from tests.training.runs import rows
from transformer.task import Translation


@pytest.mark.slow
def test_shards_train_and_translate_as_whole_replicas(small: list[str], tmp_path: Path) -> None:
    arguments = [*small, "workers.count=1", "parallel.ranks_per_worker=2", "training.steps=6", "evaluation.every=6"]
    arguments += ["optimizer=adam", "decoding.in_training=true", "decoding.extra_length=2"]
    for value in ("false", "true"):
        run = tmp_path / value
        assert launch("transformer", [*arguments, f"parallel.shard={value}", f"run_dir={run}"]) == 0
    whole, shards = rows(tmp_path / "false"), rows(tmp_path / "true")
    for one, other in zip(shards, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert shards[-1]["bleu"] == pytest.approx(whole[-1]["bleu"], abs=1)


def test_a_run_that_broke_in_the_middle_of_an_epoch_ends_as_if_it_had_not(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*small, "topology=one_peer_exponential", "optimizer=accumadam", "evaluation.keep_average=true"]
    arguments += ["workers=simulated", "workers.count=2", "training.steps=20"]
    arguments += ["training.checkpoint_every=3", "evaluation.every=7", "evaluation.models_kept=2"]
    assert launch("transformer", [*arguments, f"run_dir={tmp_path}/whole"]) == 0
    epochs = [row["epoch"] for row in rows(tmp_path / "whole")]
    assert epochs[-1] > 1

    original, calls = Translation.loss, 0

    def breaks(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 23:  # of two a step
            raise RuntimeError("the power is gone")
        return original(*given)

    monkeypatch.setattr(Translation, "loss", breaks)
    assert launch("transformer", [*arguments, f"run_dir={tmp_path}/broken"]) == 1
    assert launch("transformer", [*arguments, f"run_dir={tmp_path}/broken", "resume=true"]) == 0
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    kept = [sorted((tmp_path / name / "checkpoints/models").iterdir()) for name in ("whole", "broken")]
    assert [file.name for file in kept[0]] == ["step_00000014.pt", "step_00000020.pt"]
    for one, other in zip(*kept, strict=True):
        assert one.read_bytes() == other.read_bytes()
