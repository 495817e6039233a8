"""Small runs, and what their folders hold."""

import json
from pathlib import Path

from tests.training.runs import rows

SMALL = ["experiment=quickstart", "model.width=2", "training.checkpoint_every=20", "logging.every=5"]
# A run that takes long enough to be interrupted in the middle.
RUN = [*SMALL, "training.steps=300", "topology=aer", "seed=3"]
MIDDLE = 30


def status(run: Path) -> str | None:
    file = run / "summary.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def reached(run: Path, step: int) -> bool:
    file = run / "metrics.jsonl"
    return file.exists() and any(row["step"] >= step for row in rows(run))
