"""Runs that have not ended: how far they are, when they may end, and their last loss."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from common.experiments.runs import folders_with
from common.explorer.records import short
from common.record import read_status
from common.record.run_lock import SILENCE_S

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
RECENT = 20  # training rows whose times say how long the rest takes


def unfinished(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a line for each run below these folders that has not finished, running ones first."""
    folders = sorted({folder for root in roots for folder in folders_with(root, CONFIG)})
    lines = [line for folder in folders if (line := _line(folder)) is not None]
    return sorted(lines, key=lambda line: (line["state"] != "running", line["run"]))


def ended(roots: Sequence[Path]) -> frozenset[Path]:
    """Return the summaries of ended runs below these folders: once there are more, the page's data are out of date."""
    return frozenset(folder / SUMMARY for root in roots for folder in folders_with(root, SUMMARY))


def _line(folder: Path) -> dict[str, Any] | None:
    try:
        status = read_status(folder)
        config = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        training = config["training"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None  # it is just starting, or is not a run
    if status == "finished":
        return None
    rows = _rows(folder / METRICS)
    train = [row for row in rows if row.get("split") == "train"]
    last = train[-1] if train else {}
    done = _share(last, training)
    evaluated = next((row for row in reversed(rows) if row.get("split") == "validation"), {})
    written, beat = (_modified(folder / name) for name in (METRICS, ".lock"))
    holds = datetime.now(UTC).timestamp() - beat < SILENCE_S  # a process that was killed leaves its lock
    return {
        "run": str(folder),
        "state": "running" if holds else status or "stopped",
        "step": last.get("step", 0),
        "share": short(done),
        "seconds_left": short(_seconds_left(train, done)) if holds else None,
        "loss": short(last.get("loss")),
        "validation": {key: short(evaluated[key]) for key in ("loss", "accuracy", "bleu") if evaluated.get(key)},
        "written": datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds") if written else "",
        "curve": [[row["step"], short(row["loss"])] for row in train[:: -(-len(train) // 60) or 1] if row.get("loss")],
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that is being written, whose last line may be incomplete."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _share(last: dict[str, Any], training: dict[str, Any]) -> float | None:
    """Return the share of a run that is done, by its steps or its epochs."""
    for key, total in (("step", training.get("steps")), ("epoch", training.get("epochs"))):
        if total and key in last:
            return min(1.0, last[key] / total)
    return 0.0


def _seconds_left(train: Sequence[dict[str, Any]], done: float | None) -> float | None:
    times = [row["time_step_ms"] for row in train[-RECENT:] if row.get("time_step_ms")]
    if not times or not done:
        return None
    return train[-1]["step"] * (1 / done - 1) * sum(times) / len(times) / 1000


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
