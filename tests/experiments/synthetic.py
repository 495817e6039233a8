"""Run folders as training writes them, with numbers made up by the test."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def write_run(
    folder: Path,
    overrides: Sequence[str],
    *,
    train_loss: Sequence[float] = (2.0, 1.0, 0.5),
    epochs: float = 3,
    accuracy: Sequence[float] = (50.0, 90.0),
    metrics: dict[str, float] | None = None,
    consensus_distance: float = 0.25,
    steps: int = 30,
    workers: int = 4,
    kind: str = "simulated",
    topology: dict[str, Any] | None = None,
    bytes_sent: int = 120_000,
    time_step_ms: float = 10.0,
    status: str = "finished",
    environment: dict[str, Any] | None = None,
) -> Path:
    """`train_loss` and `accuracy` are spread evenly over the steps; bytes grow in proportion to the steps.

    metrics: more validation metrics, the same in each validation row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "seed": next((int(text.removeprefix("seed=")) for text in overrides if text.startswith("seed=")), 1),
        "workers": {"kind": kind, "count": workers, "per_host": 2},
        "topology": topology or {"name": "ring"},
        "parallel": {"method": "decentralized", "order": "awc"},
        "evaluation": {"every": 10, "average": True},
    }
    OmegaConf.save(config, folder / "config.yaml")
    recorded = {
        "start": "2026-01-02T03:04:05+00:00",
        "end": "2026-01-02T03:04:15+00:00",
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
        "hardware": {"cpu": "Test CPU", "cores": 2, "gpus": []},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "overrides": list(overrides),
        "command": ["python", "-m", "cnn.train"],
    }
    _write(folder / "environment.json", recorded | (environment or {}))

    rows = []
    for i, loss in enumerate(train_loss, start=1):
        step = round(steps * i / len(train_loss))
        sent = round(bytes_sent * step / steps)
        epoch = epochs * step / steps
        row = {"step": step, "split": "train", "epoch": epoch, "loss": loss, "bytes_sent": sent}
        rows.append(row | {"time_step_ms": time_step_ms})
    for i, value in enumerate(accuracy, start=1):
        step = round(steps * i / len(accuracy))
        distance = consensus_distance * len(accuracy) / i
        row = {"step": step, "split": "validation", "accuracy": value, "consensus_distance": distance}
        rows.append(row | (metrics or {}))
    rows.sort(key=lambda row: row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    summary = {
        "status": status,
        "steps": steps,
        "workers": workers,
        "bytes_sent": bytes_sent,
        "consensus_distance": consensus_distance,
        "time_step_ms": time_step_ms,
    }
    _write(folder / "summary.json", summary)
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
