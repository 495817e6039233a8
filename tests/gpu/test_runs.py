"""Simulated workers learn on the GPU what they learn on the CPU, and a killed run continues bit for bit."""

import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import Device, on_gpu, on_slow_cpu_too
from tests.training.runs import Ranks, assert_same_run, finish, manifests, rows
from tests.waiting import LIMIT_S, wait_for

CHECK = 5, "simulated workers, resumed runs"
RUN = ["workers=simulated", "workers.count=4", "workers.per_host=2", "topology=aer", "schedule.warmup=3", "resume=true"]
RUN += ["training.clip=1.0", "logging.every=5", "logging.progress=false", "model.width=8", "training.threads=1"]
RUN += ["training.deterministic=true", "training.tf32=false", "training.checkpoint_every=10"]
TOLERANCE = 0.02  # of a metric, relative: sums in another order


def start(folder: Path, device: str, steps: int) -> Ranks:
    arguments = [*RUN, f"training.device={device}", f"training.steps={steps}", f"run_dir={folder}"]
    return Ranks(arguments, 1, folder.with_suffix(".log"))


def difference(got: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference of two runs' numbers, relative to their size (at least 1)."""
    assert [(row["step"], row["split"]) for row in got] == [(row["step"], row["split"]) for row in expected]
    worst = 0.0
    for row, want in zip(got, expected, strict=True):
        for key, value in want.items():
            if isinstance(value, int | float):
                found = row[key] if isinstance(row.get(key), int | float) else math.nan
                few = 5 if key.startswith("accuracy") else 1  # a few images near a border
                worst = max(worst, abs(found - value) / max(1.0, abs(value)) / few, key=lambda x: (math.isnan(x), x))
    return worst


@on_slow_cpu_too
def test_metrics_are_those_of_the_cpu(device: Device, figure: Callable[[str], None], tmp_path: Path) -> None:
    for name in ("cpu", device.name):
        finish(start(tmp_path / f"on_{name}", name, 20))
    found = difference(rows(tmp_path / f"on_{device.name}"), rows(tmp_path / "on_cpu"))
    figure(f"metrics differ from the CPU's by at most {found:.1e} of their size")
    assert found <= TOLERANCE


@on_gpu  # tests.training.test_resume kills those on CPUs
def test_a_killed_run_continues_bit_for_bit(device: Device, figure: Callable[[str], None], tmp_path: Path) -> None:
    finish(start(tmp_path / "whole", device.name, 200))
    ranks = start(tmp_path / "killed", device.name, 200)
    wait_for(lambda: len(manifests(tmp_path / "killed")) >= 1)
    ranks.signal(signal.SIGKILL)
    assert ranks.wait(LIMIT_S)
    assert not (tmp_path / "killed" / "summary.json").exists(), "the run ended before it was killed"
    step = manifests(tmp_path / "killed")[0].parent.name
    finish(start(tmp_path / "killed", device.name, 200))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    figure(f"killed after {step} and resumed bit for bit")


ROWS = [{"step": 5, "split": "train", "loss": 2.0}, {"step": 5, "split": "validation", "loss": 1.9, "accuracy": 30.0}]


def test_differences_of_metrics() -> None:
    assert difference(ROWS, ROWS) == 0
    assert difference([ROWS[0] | {"loss": 2.002}, ROWS[1]], ROWS) == pytest.approx(0.001)
    assert not difference([ROWS[0] | {"loss": None}, ROWS[1]], ROWS) <= TOLERANCE
    for got in (ROWS[:1], [ROWS[0] | {"step": 6}, ROWS[1]]):
        with pytest.raises(AssertionError):
            difference(got, ROWS)
