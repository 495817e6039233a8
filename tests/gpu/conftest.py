"""The device of a test, and its row in the record, which GPU_RECORD=FOLDER asks for.

It is written before every test, as one that did not end, and after it: so a crash loses nothing else.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.device import Device
from tests.gpu.record import GpuRecord


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return Device(request.param, torch.cuda.device_count() if request.param == "cuda" else 0)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Note what was measured."""
    return lambda text: record_property("figure", text)


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
