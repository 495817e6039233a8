"""The environment of a run: versions, hardware, commit, command."""

import os
import platform
import shlex
import socket
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "pydantic", "scikit-learn")
ROOT = Path(__file__).resolve().parents[2]


def describe_environment(task: str, overrides: list[str]) -> dict[str, Any]:
    """Return a record with which other people can judge and repeat the run."""
    return {
        "start": now(),
        "end": None,
        "command": shlex.join(["python", "-m", f"{task}.train", *overrides]),
        "overrides": overrides,
        "git_commit": _git("rev-parse", "HEAD"),
        # Measurements write into results; no program depends on them.
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")),
        "hosts": [socket.gethostname()],  # of rank 0; RunFolder.record_hosts adds the others
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": _memory_gb(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "versions": {"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES},
        "platform": platform.platform(),
    }


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None
