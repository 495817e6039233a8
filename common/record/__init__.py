"""What a run leaves: its folder, metrics, checkpoints, environment and exit code. This file itself needs no torch."""

import json
from pathlib import Path

FINISHED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 75  # exit codes of a run's processes and jobs
FOLDERS = f"step_{8 * '[0-9]'}"  # of checkpoints, not a user's copy of one under another name


def read_status(folder: Path) -> str | None:
    """Return the status in a run folder's summary.json, None without one."""
    try:
        return json.loads((folder / "summary.json").read_text()).get("status")
    except (OSError, ValueError, AttributeError):
        return None
