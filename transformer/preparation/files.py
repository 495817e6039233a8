"""Writing files atomically, and reading them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.atomic import describe, write_atomically
from common.config.config import ConfigError


def write_lines(file: Path, lines: Iterable[str]) -> None:
    """Write a text file atomically."""

    def write(stream: Any) -> None:
        for line in lines:
            stream.write(f"{line}\n".encode())

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, write)


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, split at line feeds only: text may hold other separators.

    Raises ConfigError as `decoded` does.
    """
    with file.open("rb") as stream:
        yield from decoded(stream, str(file))


def decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a stream of bytes. Raises ConfigError naming the first line that is not UTF-8."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.removesuffix(b"\n").decode()
        except UnicodeDecodeError as error:
            reason = f"byte {error.object[error.start]:#04x}, number {error.start + 1} of the line, {error.reason}"
            raise ConfigError(f"{name}, line {number}: expected UTF-8, found {reason}") from error


def read_text(file: Path) -> Iterator[str]:
    """Yield the lines of a user's text, without a byte order mark and carriage returns."""
    for number, line in enumerate(read_lines(file)):
        yield (line if number else line.removeprefix("\ufeff")).rstrip("\r")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_lines(file, [json.dumps(content, indent=2, ensure_ascii=False)])


def read_json(file: Path) -> dict[str, Any] | None:
    """Read a JSON file; return None if it is missing or broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def digest(file: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    return describe(file)["sha256"]
