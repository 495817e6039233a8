"""Files that are written whole or not at all; without torch, whose import takes seconds in every process."""

import hashlib
import os
from pathlib import Path
from typing import Any


def describe(content: bytes) -> dict[str, Any]:
    """Return size and checksum."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_atomically(file: Path, content: bytes) -> dict[str, Any]:
    """Write a temporary file, sync, rename; a crash leaves the old file or the new one. Returns `describe`."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return describe(content)
