"""Check 6, first part: `time_step_ms` of a run is the time between the ends of steps on the GPU."""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common.training.launch import launch
from common.training.recorder import Recorder
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.small_runs import steps_only

EVERY, WINDOWS, UNTIMED_WINDOWS = 10, 7, 2
TOLERANCE = 0.05


class Clock:
    """Marks in time: CUDA events on a GPU, which count when the GPU gets there, else the processor's time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Add a mark behind everything that was started so far."""
        if self._machine.on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the times from each mark to the next one."""
        self._machine.settle()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._machine.on_gpu:
            return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def compare_step_times(machine: Machine, tolerance: float = TOLERANCE) -> str:
    """Return the ratio of the reported to the measured time of a step, the median over windows of EVERY steps.

    Raises FailedError if it is not 1 up to the tolerance.
    """
    reported, measured = measure(machine)
    ratio = statistics.median(r / m for r, m in zip(reported, measured, strict=True))
    if abs(ratio - 1) > tolerance:
        raise FailedError(
            f"time_step_ms is {statistics.median(reported):.2f}, {ratio:.3f} times the measured "
            f"{statistics.median(measured):.2f} ms"
        )
    return f"time_step_ms {ratio:.3f} of {statistics.median(measured):.1f} ms measured"


def measure(machine: Machine) -> tuple[Sequence[float], Sequence[float]]:
    """Return the milliseconds of a step in each window of a GPT-2 run, as reported and as measured."""
    clock, step = Clock(machine), Recorder.step

    def marking(recorder: Recorder, *args: Any, **options: Any) -> None:
        clock.mark()
        step(recorder, *args, **options)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Recorder, "step", marking):
        arguments = [*steps_only("gpt2", machine, folder, EVERY * WINDOWS), f"logging.every={EVERY}"]
        if machine.on_gpu:
            arguments.append("training.precision=bf16")
        if code := launch("gpt2", arguments):
            raise FailedError(f"gpt2.train ended with exit code {code}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    reported = [row["time_step_ms"] for row in rows if row["split"] == "train"]
    steps = clock.seconds()  # the first is that of the second step
    windows = [steps[EVERY * window - 1 : EVERY * (window + 1) - 1] for window in range(WINDOWS)]
    measured = [1000 * statistics.fmean(window) for window in windows[UNTIMED_WINDOWS:]]
    return reported[UNTIMED_WINDOWS:], measured
