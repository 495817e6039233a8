"""Files that are written whole or not at all; without torch, whose import takes seconds in every process."""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def describe(file: Path) -> dict[str, Any]:
    """Return the size and checksum of a file, read piece by piece."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}


class Hashing:
    """A writable stream that passes everything on to another one and keeps track of size and checksum."""

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
        """Return size and checksum of what was written, as the function `describe` does for a file."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return nested dicts, lists, tuples and plain values as JSON, with null for NaN and infinities (not in JSON)."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def temporary(file: Path, suffix: str = "tmp") -> Path:
    """Return a hidden name next to the file, unique to this process: pids repeat on other hosts and in containers."""
    return file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.{suffix}")


def write_atomically(file: Path, content: bytes | Callable[[Hashing], object]) -> dict[str, Any]:
    """Write a temporary file, sync, rename; a crash leaves the old file or the new one. Returns `describe`.

    Several processes may write the same file: it ends up with the content of one of them. If writing fails, for example
    on a full disk, no trace is left.

    content: the file's bytes, or a function that writes them to a stream
    """
    mine = temporary(file)
    try:
        with mine.open("xb") as stream:
            hashing = Hashing(stream)
            if callable(content):
                content(hashing)
            else:
                hashing.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        mine.replace(file)
    except BaseException as error:
        mine.unlink(missing_ok=True)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides it
        if isinstance(cause, OSError) and cause.errno:
            raise OSError(cause.errno, cause.strerror, str(file)) from None
        raise
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return hashing.describe()
