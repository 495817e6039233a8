"""Records of benchmarks: a table, the definitions of its columns, and the origin of the numbers."""

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pandas as pd

from common.atomic import write_atomically
from common.record.environment import describe_environment
from common.report.tables import page


class Benchmark:
    """The record of one benchmark. Create it before the first measurement, because it notes the machine's load.

    columns:  the definition of each column, in the order of the table
    formats:  how numbers are shown; others get two decimals
    """

    def __init__(self, name: str, title: str, columns: Mapping[str, str], formats: Mapping[str, str]) -> None:
        self._name, self._title, self._columns, self._formats = name, title, columns, formats
        self._environment = describe_environment("", [])
        self._load = os.getloadavg()[0]

    @property
    def machine(self) -> str:
        """The processor and its number of cores."""
        hardware = self._environment["hardware"]
        return f"{hardware['cpu']}, {hardware['cores']} cores"

    @property
    def commit(self) -> str:
        """The short commit hash at the time when this object was created."""
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
        """Write <output>/<name>.csv and .md, and print the table and their names.

        conclude:  paragraphs above the table
        used:      the part of the hardware that was used, for instance "1 used"
        packages:  distributions whose versions matter, besides the usual ones
        """
        frame = self.save(rows, output)
        parts = {
            "Columns": [f"`{name}`: {definition}" for name, definition in self._columns.items()],
            "Where the numbers come from": self._origin(command, used, packages),
        }
        text = page(self._title, "\n\n".join(conclude), self._markdown(frame), "", parts)
        write_atomically(Path(output) / f"{self._name}.md", text.encode())
        print(frame.to_string(index=False))
        print(f"written: {Path(output) / self._name}.csv and .md")

    def save(self, rows: Sequence[Mapping[str, object]], output: str) -> pd.DataFrame:
        """Write only <output>/<name>.csv, as long measurements do after each part, and return the table."""
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
            f"Hardware: {self.machine}, of which {used}",
            f"Load average: {self._load:.1f} before, {os.getloadavg()[0]:.1f} after",
            f"Software: {', '.join(f'{name} {version}' for name, version in versions.items())}",
            f"Date: {environment['start']}",
            f"Commit: {environment['git_commit']}{self._changes}",
            f"Made by `{command}`",
        ]
