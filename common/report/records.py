"""The texts of benchmarks' records, as pages show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ORIGIN = "Columns", "Where the numbers come from"  # headings of a record


@dataclass(frozen=True)
class RecordText:
    """The text of a benchmark's .md without its table; `findings` are the paragraphs and points above that."""

    title: str
    findings: Sequence[str]
    definitions: Sequence[str]
    origin: Sequence[str]


def read_record(path: Path) -> RecordText:
    """Read <name>.md as `Benchmark.write` of scripts.benchmarks.record wrote it."""
    head, *rest = path.read_text(encoding="utf-8").split("\n## ")
    title, *above = head.split("\n", 1)
    parts = dict(part.split("\n", 1) for part in rest)
    above = [line.removeprefix("- ") for line in above[0].splitlines() if line and not line.startswith("|")]
    return RecordText(title.removeprefix("# "), above, _points(parts[COLUMNS]), _points(parts[ORIGIN]))


def _points(text: str) -> list[str]:
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
