"""The device of a test, and the record of what held on GPUs.

With GPU_RECORD=FOLDER each check, a file of tests, has a row in FOLDER/gpu_check.{csv,md}; rows of other checks stay.
Each is written before every test, as one that did not end, and after it: so a crash loses nothing else.
"""

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from common.record.environment import now
from scripts.benchmarks.record import Benchmark
from tests.gpu.device import Device

COLUMNS = {
    "number": "of the check",
    "check": "what must hold",
    "result": "passed, failed or skipped",
    "figure": "what was measured, the failure, or the reason for skipping",
    "seconds": "that the check took",
    "hardware": "the GPUs, and the versions of torch, CUDA and NCCL",
    "date": "UTC, when the check ended",
    "commit": "of the code",
}
RESULTS = ("skipped", "passed", "failed")  # of a check: the last of its tests' in this order


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return Device(request.param, torch.cuda.device_count() if request.param == "cuda" else 0)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Note what was measured."""
    return lambda text: record_property("figure", text)


class GpuRecord:
    """The rows; `tests` are those of this session: {number: {test: (result, figures, seconds)}}."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._benchmark = Benchmark("gpu_check", "Checks on GPUs", COLUMNS, {"number": ".0f", "seconds": ".0f"})
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else "none"
        self.hardware = f"{gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
        self._tests: dict[int, dict[str, tuple[str, list[str], float]]] = {}

    def add(self, check: tuple[int, str], test: str, result: str, figures: list[str], seconds: float) -> None:
        number, title = check
        tests = self._tests.setdefault(number, {})
        tests[test] = result, figures, seconds
        rows = {}
        with contextlib.suppress(FileNotFoundError):
            rows = {row["number"]: row for row in pd.read_csv(self._folder / "gpu_check.csv").to_dict("records")}
        results, texts, times = zip(*tests.values(), strict=True)
        rows[number] = {
            "number": number,
            "check": title,
            "result": max(results, key=RESULTS.index),
            "figure": "; ".join(dict.fromkeys(text for found in texts for text in found)) or f"{len(tests)} tests",
            "seconds": sum(times),
            "hardware": self.hardware,
            "date": now(),
            "commit": self._benchmark.commit,
        }
        said = f"`make gpu-check` on {self.hardware}. Each row has its own date and commit."
        with contextlib.redirect_stdout(io.StringIO()):
            ordered = [rows[number] for number in sorted(rows)]
            self._benchmark.write(ordered, [said], str(self._folder), "make gpu-check", f"the GPUs {self.hardware}")


def pytest_configure(config: pytest.Config) -> None:
    config.record = GpuRecord(os.environ["GPU_RECORD"]) if os.environ.get("GPU_RECORD") else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if recorded(item):
        item.config.record.add(item.module.CHECK, item.name, "failed", [f"{item.name} did not end"], 0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = yield
    if recorded(item) and (report.when == "call" or not report.passed):
        figures = [text for name, text in report.user_properties if name == "figure"]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            figures.append(f"{item.name}: {' '.join(str(crash.message if crash else report.longrepr).split())[-400:]}")
        elif report.skipped:
            figures.append(report.longrepr[2].removeprefix("Skipped: "))
        item.config.record.add(item.module.CHECK, item.name, report.outcome, figures, report.duration)
    return report


def recorded(item: pytest.Item) -> bool:
    return item.config.record is not None and item.get_closest_marker("gpu") is not None
