"""Writing files atomically, and reading them."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.training.atomic import temporary
from common.training.config import ConfigError

BLOCK = 1 << 20


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes `file` when the block ends without an error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary(file, "partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_lines(file: Path, lines: Iterable[str]) -> None:
    """Write a text file atomically."""
    with whole(file) as partial, partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{line}\n" for line in lines)


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
    """Yield the lines of a user's text, without a byte order mark and carriage returns, which are no part of them."""
    for number, line in enumerate(read_lines(file)):
        yield (line if number else line.removeprefix("\ufeff")).rstrip("\r")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with whole(file) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any] | None:
    """Read a JSON file; return None if it is missing or broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def digest(file: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()
