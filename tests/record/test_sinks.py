"""wandb and TensorBoard receive the rows of metrics.jsonl, continue after a resume, and cannot end a run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.launch.processes import launch
from common.record.sinks import numbers
from tests.training.runs import RUN, forget, rows

SIMULATED = [
    *[*RUN, "workers=simulated", "workers.count=2", "training.steps=9", "evaluation.every=4"],
    "logging.noise_scale_every=null",  # null in metrics.jsonl is NaN in the sinks
]


def test_tensorboard_holds_what_metrics_holds(tmp_path: Path) -> None:
    leaves = "elastic.script=[{step: 5, leave: [1]}]"  # a row of lists, too
    assert launch("cnn", [*SIMULATED, leaves, "logging.tensorboard=true", f"run_dir={tmp_path}"]) == 0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in rows(tmp_path, times=True):
        for name, value in numbers(row).items():
            if isinstance(value, int | float):
                expected.setdefault(name, []).append((row["step"], value))
    assert set(events.Tags()["scalars"]) == set(expected)
    assert {"train/loss", "train/lr", "validation/accuracy", "validation/consensus_distance"} <= set(expected)
    for name, points in expected.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points]
        assert [value for _, value in found] == pytest.approx([value for _, value in points], rel=1e-5)


def test_what_a_resumed_run_computes_again_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, ends = [], []
    wandb = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: wandb, run="failed")
    wandb.finish = lambda exit_code=0: ends.append(exit_code)
    wandb.log = lambda values, step: sent.append(step)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    arguments = [*SIMULATED, "training.steps=24", "logging.every=1", f"run_dir={tmp_path}"]
    arguments += ["logging.tensorboard=true", "logging.wandb=online", "training.checkpoint_every=10"]
    assert launch("cnn", arguments) == 0
    forget(tmp_path, 24)
    assert launch("cnn", arguments) == 0
    steps = [*range(1, 25)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == steps
    assert sent == sorted([*steps, *range(4, 25, 4)])  # and evaluations
    assert ends == [1, 0] * 2  # no start goes on in a run that failed before


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_id_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SIMULATED, "logging.wandb=offline", f"run_dir={tmp_path}"]
    assert launch("cnn", arguments) == 0
    (tmp_path / "summary.json").unlink()  # as if it had been killed at the end
    assert launch("cnn", arguments) == 0
    runs = [folder.name.rsplit("-", 1)[1] for folder in (tmp_path / "wandb").glob("offline-run-*")]
    identity = json.loads((tmp_path / "environment.json").read_text())["run_id"]
    assert len(runs) == 2
    assert f"to upload the run: `wandb sync {tmp_path}/wandb/offline-run-*`" in capsys.readouterr().err
    assert set(runs) == {identity}


@pytest.mark.parametrize("breaks", ["init", "log", "finish"])
def test_a_broken_service_is_named_once_and_ends_nothing(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged, left = [], []

    class Wandb:
        """Stands for the module and for a run."""

        Settings, run = staticmethod(lambda **_: None), None

        def init(self, **_: object) -> "Wandb":
            self._may_break("init")
            return self

        def log(self, values: dict, step: int) -> None:
            logged.append((step, values))
            self._may_break("log")

        def finish(self) -> None:
            self._may_break("finish")

        def teardown(self) -> None:
            left.append("service")
            raise ConnectionError("no route to host either")

        def _may_break(self, where: str) -> None:
            if where == breaks:
                raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    assert launch("cnn", [*SIMULATED, "logging.wandb=online", f"run_dir={tmp_path}"]) == 0
    assert capsys.readouterr().err.count("wandb failed and is disabled from now on: no route to host") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    everything = [(row["step"], numbers(row)) for row in rows(tmp_path, times=True)]
    assert logged == {"init": [], "log": everything[:1], "finish": everything}[breaks]
    assert left == ["service"] * (breaks != "init")
