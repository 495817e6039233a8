"""The record of the checks: a table that keeps the rows of checks which were not run this time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from common.training.environment import now
from scripts.benchmarks.record import Benchmark

NAME = "gpu_check"
COLUMNS = {
    "number": "of the check, for checks=...",
    "check": "what must hold",
    "result": "passed, failed or skipped",
    "figure": "what was measured, the failure, or the reason for skipping",
    "seconds": "that the check took",
    "hardware": "the GPUs, and the versions of torch, CUDA and NCCL",
    "date": "UTC, when the check ended",
    "commit": "of the code",
}
FORMATS = {"number": ".0f", "seconds": ".0f"}
PRINTED = ("number", "check", "result", "figure", "seconds")

Row = dict[str, object]


class Record:
    """Collects a row for each check. Make it before the first one."""

    def __init__(self) -> None:
        self._benchmark = Benchmark(NAME, "Checks on GPUs", COLUMNS, FORMATS)
        self._hardware = describe_gpus()
        self.rows: list[Row] = []

    def add(self, number: int, check: str, result: str, figure: str, seconds: float) -> Row:
        """Add a row and return it."""
        origin = {"hardware": self._hardware, "date": now(), "commit": self._benchmark.commit}
        row = {"number": number, "check": check, "result": result, "figure": figure, "seconds": seconds} | origin
        self.rows.append(row)
        return row

    def write(self, output: str, command: str) -> None:
        """Write <output>/gpu_check.csv and .md; other checks' rows of an earlier record stay."""
        rows = merged(self.rows, read(Path(output) / f"{NAME}.csv"))
        said = f"`make gpu-check` on {self._hardware}. Each row has its own date and commit."
        self._benchmark.write(rows, [said], output, command, f"the GPUs {self._hardware}")


def read(file: Path) -> list[Row]:
    """Return the rows of an earlier record, none if there is no such file."""
    return pd.read_csv(file).to_dict("records") if file.exists() else []


def merged(new: Sequence[Row], old: Sequence[Row]) -> list[Row]:
    """Return new rows, and old ones of other checks, by number."""
    rows = {row["number"]: row for row in (*old, *new)}
    return [rows[number] for number in sorted(rows)]


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return what is printed on a terminal."""
    frame = pd.DataFrame(rows, columns=list(PRINTED))
    return frame.to_markdown(index=False, floatfmt=".0f", maxcolwidths=[None, None, None, 80, None])


def describe_gpus() -> str:
    """Return the GPUs and the versions of torch, CUDA and NCCL."""
    if not torch.cuda.is_available():
        return "no GPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
