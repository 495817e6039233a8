"""What a benchmark leaves behind: its table, the definitions of the columns, and where the numbers come from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pandas as pd

from common.training.atomic import write_atomically
from common.training.environment import describe_environment

COLUMNS, ORIGIN = "Columns", "Where the numbers come from"


class Benchmark:
    """One benchmark's record. Make it before the first measurement: it notes how busy the machine is.

    columns: each column's definition, in the order of the table; formats: of numbers, others get two decimals
    """

    def __init__(self, name: str, title: str, columns: Mapping[str, str], formats: Mapping[str, str]) -> None:
        self._name, self._title, self._columns, self._formats = name, title, columns, formats
        self._environment = describe_environment("", [])
        self._load = os.getloadavg()[0]

    @property
    def machine(self) -> str:
        """Its processor and cores."""
        hardware = self._environment["hardware"]
        return f"{hardware['cpu']}, {hardware['cores']} cores"

    @property
    def commit(self) -> str:
        """The short one, as it was when the record was made."""
        return f"{str(self._environment['git_commit'])[:12]}{self._changes}"

    @property
    def _changes(self) -> str:
        return " with uncommitted changes" * self._environment["git_dirty"]

    def write(
        self,
        rows: Sequence[Mapping[str, object]],
        conclude: Sequence[str],
        output: str,
        command: str,
        used: str,
        packages: Sequence[str] = (),
    ) -> None:
        """Write <output>/<name>.csv and .md, and say so.

        conclude: paragraphs above the table; used: what part of the hardware, for instance "1 used"; packages:
        distributions whose versions matter, beside the usual ones
        """
        folder = Path(output)
        frame = self.save(rows, output)
        lines = [f"# {self._title}", ""]
        for paragraph in conclude:
            lines += [paragraph, ""]
        lines += [self._markdown(frame), "", f"## {COLUMNS}", ""]
        lines += [f"- `{name}`: {definition}" for name, definition in self._columns.items()]
        lines += ["", f"## {ORIGIN}", "", *self._origin(command, used, packages)]
        write_atomically(folder / f"{self._name}.md", ("\n".join(lines) + "\n").encode())
        print(frame.to_string(index=False))
        print(f"written: {folder / self._name}.csv and .md")

    def save(self, rows: Sequence[Mapping[str, object]], output: str) -> pd.DataFrame:
        """Write <output>/<name>.csv alone, as long measurements do after each of their parts. Returns the table."""
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows, columns=list(self._columns))
        text = frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
        write_atomically(folder / f"{self._name}.csv", text.encode())
        return frame

    def _markdown(self, frame: pd.DataFrame) -> str:
        shown = frame.astype(object).where(frame.notna(), None)
        formats = [self._formats.get(name, ".2f") for name in self._columns]
        return shown.to_markdown(index=False, floatfmt=formats, missingval="")

    def _origin(self, command: str, used: str, packages: Sequence[str]) -> list[str]:
        environment = self._environment
        versions = environment["versions"] | {package: metadata.version(package) for package in packages}
        return [
            f"- Hardware: {self.machine}, of which {used}",
            f"- Load average: {self._load:.1f} before, {os.getloadavg()[0]:.1f} after",
            f"- Software: {', '.join(f'{name} {version}' for name, version in versions.items())}",
            f"- Date: {environment['start']}",
            f"- Commit: {environment['git_commit']}{self._changes}",
            f"- Made by `{command}`",
        ]


@dataclass(frozen=True)
class Record:
    """What a benchmark's .md says besides its table. findings: the paragraphs and points above it."""

    title: str
    findings: Sequence[str]
    definitions: Sequence[str]
    origin: Sequence[str]


def read_record(path: Path) -> Record:
    """Read what `Benchmark.write` wrote as <path>.md."""
    head, *rest = path.read_text(encoding="utf-8").split("\n## ")
    title, *above = head.split("\n", 1)
    parts = dict(part.split("\n", 1) for part in rest)
    above = [line.removeprefix("- ") for line in above[0].splitlines() if line and not line.startswith("|")]
    return Record(title.removeprefix("# "), above, _points(parts[COLUMNS]), _points(parts[ORIGIN]))


def _points(text: str) -> list[str]:
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
