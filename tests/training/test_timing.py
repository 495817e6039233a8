"""Times of steps, on a GPU by events (here of a device made of two numbers), and traces."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cnn.task import TASK
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.record.checkpoint import Checkpoints
from common.training import recorder as module
from common.training.recorder import Recorder
from common.training.timing import StepClock
from common.training.worker import build_workers
from scripts.plot_trace import main, read_spans
from tests.training.runs import RUN, rows


class Gpu:
    """A device that works off its queue behind a host that only launches; both times are in seconds."""

    def __init__(self) -> None:
        self.host = self.free = 0.0

    def launch(self, seconds: float) -> None:
        self.host += 0.001
        self.free = max(self.host, self.free) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.host, self.gpu.free)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert self.gpu.host >= end.at, "read before the device was there"
        return 1000 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(time, "perf_counter", lambda: device.host)
    return device


def test_a_step_on_a_gpu_takes_the_time_that_the_device_needs(gpu: Gpu) -> None:
    clock = StepClock(torch.device("cuda"))
    for _ in range(3):
        gpu.launch(0.1)
        clock.end_step()
    assert gpu.host < 0.01  # nobody has waited yet
    gpu.launch(5.0)  # an evaluation
    gpu.wait()
    clock.restart()
    gpu.launch(0.3)
    clock.end_step()
    assert clock.times() == pytest.approx([0.101, 0.1, 0.1, 0.301])
    assert clock.times() == []


def test_a_step_on_a_cpu_takes_the_hosts_time(gpu: Gpu) -> None:
    clock = StepClock(torch.device("cpu"))
    for seconds in (0.2, 0.4):
        gpu.host += seconds
        clock.end_step()
    gpu.host += 9.0
    clock.restart()
    gpu.host += 0.5
    clock.end_step()
    assert clock.times() == pytest.approx([0.2, 0.4, 0.5])


@pytest.fixture
def recorded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, list[dict[str, Any]]]:
    """Return a recorder of a run on that device, and the rows that it writes."""
    sizes = ["workers=simulated", "workers.count=2", "model.width=4", "logging.every=5", "training.steps=10"]
    sizes += ["training.clip=1.5"]
    config = compose_config("cnn", sizes)
    task, rows = TASK(config), []
    monkeypatch.setattr(module, "StepClock", lambda device: StepClock(torch.device("cuda")))
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: gpu.wait() or tolist(tensor))
    recorder = Recorder(config, task, None)
    recorder.begin(build_workers(task, config, torch.device("cpu"), 0, 10, 10), 10, config)
    monkeypatch.setattr(recorder, "_write", rows.append)
    return recorder, rows


def step(recorder: Recorder, committed: bool = True, norm: float = 1.0) -> None:
    for worker in recorder._workers:
        worker.model.clock += committed
    recorder.step(committed, [torch.tensor(1.0)] * 2, [torch.tensor(norm)] * 2)


def test_rows_wait_for_the_device_before_they_read_the_time(gpu: Gpu, recorded) -> None:
    recorder, rows = recorded
    for _ in range(10):
        gpu.launch(0.1)
        step(recorder)
    assert [row["time_step_ms"] for row in rows] == pytest.approx([100, 100], rel=0.01)
    assert recorder.state_dict()["recent_times"] == pytest.approx([0.1] * 10, rel=0.02)


def test_a_checkpoint_holds_the_times_since_the_last_row(gpu: Gpu, recorded) -> None:
    recorder, _ = recorded
    for _ in range(3):
        gpu.launch(0.1)
        step(recorder)
    assert recorder.state_dict()["times"] == pytest.approx([0.1] * 3, rel=0.02)


def test_a_row_adds_up_over_ranks_once_and_leaves_out_norms_of_skipped_steps(
    gpu: Gpu, recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, rows = recorded
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(module, "sum_over_ranks", lambda values, group: sums.append(values) or values)
    step(recorder, committed=False, norm=float("inf"))
    for norm in (2.0, 2.0, 1.0, 1.5, 3.5):
        gpu.launch(0.1)
        step(recorder, norm=norm)
    (row,) = rows
    assert (row["grad_norm"], row["clipped_fraction"], row["loss"], row["step"]) == (2.0, 0.6, 1.0, 5)
    assert len(sums) == 1


def test_evaluations_and_checkpoints_are_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = lambda method: lambda *arguments: (time.sleep(1.0), method(*arguments))[1]  # noqa: E731
    for name in ("save", "save_model"):
        monkeypatch.setattr(Checkpoints, name, slow(getattr(Checkpoints, name)))
    steps = ["training.steps=4", "training.checkpoint_every=2", "evaluation.every=2", "logging.every=1"]
    small = ["workers=simulated", "workers.count=2", "model.width=4", "schedule.warmup=0", "logging.progress=false"]
    assert launch("cnn", [*steps, *small, f"run_dir={tmp_path}/run"]) == 0
    times = [row["time_step_ms"] for row in rows(tmp_path / "run", times=True) if row["split"] == "train"]
    assert max(times[1:]) < 1000


def test_messages_travel_during_the_passes(tmp_path: Path) -> None:
    # An evaluation or a checkpoint waits for what travels.
    rare = ["training.checkpoint_every=1000", "evaluation.every=1000"]
    arguments = [*RUN, *rare, "workers.count=2", "training.steps=20", "profile=true", f"run_dir={tmp_path}/run"]
    assert launch("cnn", arguments) == 0
    for rank in range(2):
        spans = read_spans(tmp_path / "run" / "trace" / f"rank_{rank}.json")
        assert [len(spans[name]) for name in ("step", "forward", "backward", "optimizer")] == [4, 4, 4, 4]
        assert len(spans["gossip::launch"]) == len(spans["gossip::merge"]) == 4
        for (forward, _), (backward, length) in zip(spans["forward"][1:], spans["backward"][1:], strict=True):
            assert any(
                begin < forward and begin + last > backward + length for begin, last in spans["messages in flight"]
            )
    assert main([f"trace={tmp_path}/run/trace/rank_0.json"]) == 0
    assert (tmp_path / "run" / "trace" / "rank_0.png").read_bytes().startswith(b"\x89PNG")


def test_simulated_workers_are_traced_too(tmp_path: Path, capsys) -> None:
    arguments = [*RUN, "workers=simulated", "workers.count=2", "training.steps=20", "profile=true"]
    assert launch("cnn", [*arguments, f"run_dir={tmp_path}/run"]) == 0
    assert len(read_spans(tmp_path / "run" / "trace" / "rank_0.json")["forward"]) == 8
    assert f"trace: {tmp_path}/run/trace/rank_0.json\n" in capsys.readouterr().err


def test_too_few_steps_for_a_trace_are_told(tmp_path: Path, capsys) -> None:
    arguments = [*RUN, "workers=simulated", "workers.count=2", "training.steps=12", "profile=true"]
    assert launch("cnn", [*arguments, f"run_dir={tmp_path}/run"]) == 0
    assert "profile=true: no trace: recording begins at step 13" in capsys.readouterr().err


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "trace.json"
    assert main([f"trace={file}"]) == 2
    file.write_text(json.dumps({"traceEvents": []}))
    assert main([f"trace={file}"]) == 2
    assert "profile=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        '{"traceEvents": 5}',
        '{"traceEvents": [null]}',
        '{"traceEvents": [{"ph": "X", "cat": "user_annotation"}]}',
        '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": "x"}]}',
    ],
)
def test_json_that_is_no_trace_is_refused(content: str, tmp_path, capsys) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main([f"trace={tmp_path / 'a.json'}"]) == 2
    assert f"trace={tmp_path / 'a.json'}: expected a trace of profile=true (" in capsys.readouterr().err
