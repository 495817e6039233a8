"""Files that are written whole or not at all; without torch, whose import takes seconds in every process."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def describe(file: Path) -> dict[str, Any]:
    """Return the size and checksum of a file, read piece by piece."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}


class Hashing:
    """A stream to write to that passes everything on to another one and adds up size and checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self._bytes = stream, hashlib.sha256(), 0

    def write(self, content: bytes | memoryview) -> int:
        """Write a piece."""
        self._digest.update(content)
        self._bytes += len(content)
        return self._stream.write(content)

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()

    def describe(self) -> dict[str, Any]:
        """Return what `describe` does of the file."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_atomically(file: Path, content: bytes | Callable[[Hashing], object]) -> dict[str, Any]:
    """Write a temporary file, sync, rename; a crash leaves the old file or the new one. Returns `describe`.

    content: the file's bytes, or a function that writes them to a stream
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        hashing = Hashing(stream)
        if callable(content):
            content(hashing)
        else:
            hashing.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return hashing.describe()
