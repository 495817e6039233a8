"""The record of what held on GPUs."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from common.record.environment import now
from scripts.benchmarks.record import Benchmark

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


class GpuRecord:
    """The rows in FOLDER/gpu_check.{csv,md}, one for each check; those of other checks stay."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._benchmark = Benchmark("gpu_check", "Checks on GPUs", COLUMNS, {"number": ".0f", "seconds": ".0f"})
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else "none"
        self.hardware = f"{gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
        # Of this session: {number: {test: (result, figures, seconds)}}.
        self._tests: dict[int, dict[str, tuple[str, list[str], float]]] = {}

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that were written, by the number of their check."""
        with contextlib.suppress(FileNotFoundError):
            table = pd.read_csv(self._folder / "gpu_check.csv", dtype={"commit": str})
            return {row["number"]: row for row in table.to_dict("records")}
        return {}

    def passed_here(self, number: int) -> bool:
        """Return whether the check passed with this commit, without other changes, these versions and this hardware."""
        row, commit = self.rows.get(number, {}), self._benchmark.commit
        same = (row.get("commit"), row.get("hardware")) == (commit, self.hardware)
        return row.get("result") == "passed" and same and re.fullmatch("[0-9a-f]+", commit) is not None

    def add(self, check: tuple[int, str], test: str, result: str, figures: list[str], seconds: float) -> None:
        number, title = check
        tests = self._tests.setdefault(number, {})
        tests[test] = result, figures, seconds
        rows = self.rows
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
