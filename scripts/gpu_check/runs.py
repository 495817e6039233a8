"""Check 5: simulated workers learn on the GPU what they learn on the CPU, and a killed run continues as before.

Where the configuration knows `training.deterministic`, a resumed run on a GPU must have the same metrics bit for bit.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.training.config import TrainingConfig
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.processes import run_program, started_program, tail

RUN = ["workers=simulated", "workers.count=4", "workers.per_host=2", "topology=aer", "schedule.warmup=3"]
RUN += ["training.clip=1.0", "logging.every=5", "logging.progress=false", "model.width=8"]
COMPARED_STEPS, RESUMED_STEPS, CHECKPOINT_EVERY = 20, 200, 10
# Largest relative differences of a metric. Against the CPU: sums in another order, and TF32 in convolutions.
DEVICE_TOLERANCE, RESUME_TOLERANCE = 0.02, 0.02
TIMEOUT_S = 240.0


def check(machine: Machine) -> str:
    """Compare the device with the CPU, then an interrupted run with an uninterrupted one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_cpu = train(folder / "cpu", "cpu", COMPARED_STEPS)
        on_device = train(folder / "device", machine.device, COMPARED_STEPS)
        between_devices = compare(on_device, on_cpu, DEVICE_TOLERANCE, "simulated workers against the CPU")
        whole = train(folder / "whole", machine.device, RESUMED_STEPS)
        resumed_at = kill(folder / "killed", machine.device, RESUMED_STEPS)
        resumed = train(folder / "killed", machine.device, RESUMED_STEPS)
        tolerance = 0.0 if is_exact(machine.device) else RESUME_TOLERANCE
        after_resuming = compare(resumed, whole, tolerance, f"a run killed after step {resumed_at} and resumed")
    return (
        f"metrics differ from the CPU's by at most {between_devices:.1e} of their size; killed after step {resumed_at} "
        f"and resumed by {after_resuming:.1e}"
    )


def is_exact(device: str) -> bool:
    """Return whether a resumed run must be equal bit for bit."""
    return device == "cpu" or "deterministic" in TrainingConfig.model_fields


def command(folder: Path, device: str, steps: int) -> list[str]:
    """Return the command of a run of simulated workers, which continues what is in its folder."""
    options = [f"training.device={device}", f"training.steps={steps}", f"training.checkpoint_every={CHECKPOINT_EVERY}"]
    if "deterministic" in TrainingConfig.model_fields:
        options.append("training.deterministic=true")
    if "tf32" in TrainingConfig.model_fields:
        options.append("training.tf32=false")
    return [sys.executable, "-m", "cnn.train", *RUN, *options, "resume=true", f"run_dir={folder}"]


def train(folder: Path, device: str, steps: int) -> list[dict[str, Any]]:
    """Run to the end and return the metrics. Raises FailedError if the run fails."""
    code, output = run_program(command(folder, device, steps), TIMEOUT_S)
    if code:
        raise FailedError(f"a run on {device} ended with exit code {code}: {tail(output)}")
    return metrics(folder)


def kill(folder: Path, device: str, steps: int) -> int:
    """Kill a run once it has saved; return the step of its checkpoint. Raises FailedError if it ends or hangs."""
    with started_program(command(folder, device, steps)) as (process, log):
        deadline = time.monotonic() + TIMEOUT_S
        while not (saved := sorted(folder.glob("checkpoints/step_*/manifest.json"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise FailedError(f"no checkpoint to resume from: {tail(log.read_text())}")
            time.sleep(0.02)
        process.kill()
        process.wait()
    step = int(saved[-1].parent.name.removeprefix("step_"))
    if (folder / "summary.json").exists():
        raise FailedError(f"the run ended before it could be killed after step {step}")
    return step


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without their times; null, which stands for numbers that are not finite, is NaN."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: math.nan if v is None else v for k, v in row.items() if not k.startswith("time_")} for row in rows]


def compare(got: Sequence[dict], expected: Sequence[dict], tolerance: float, what: str) -> float:
    """Return the largest difference of two runs' numbers, relative to their size (at least 1).

    Raises FailedError if rows are missing or a number differs by more than the tolerance.
    """
    if [(row["step"], row["split"]) for row in got] != [(row["step"], row["split"]) for row in expected]:
        raise FailedError(f"{what}: {len(got)} rows of metrics, expected those of {len(expected)} others")
    worst = 0.0
    for row, want in zip(got, expected, strict=True):
        for key, value in want.items():
            if not isinstance(value, int | float):
                continue
            difference = abs(row.get(key, math.nan) - value) / max(1.0, abs(value))
            if key.startswith("accuracy") and tolerance:  # a few images near a border
                difference /= 5
            if not difference <= tolerance:
                raise FailedError(
                    f"{what}: {key} of step {row['step']} is {row.get(key)}, expected {value} up to {tolerance:g}"
                )
            worst = max(worst, difference)
    return worst
