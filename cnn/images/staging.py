"""Copies of data files on this host's own disk."""

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.training.config import ConfigError


def stage(files: Sequence[Path], target: Path) -> list[Path]:
    """Copy the files below `target` unless complete copies are there, and return the copies.

    Every process of a host calls it: one copies while the others wait for its lock, which the system releases if it
    dies. A copy gets its name, and the source's time, once it is complete. Raises ConfigError if it does not fit or
    cannot be written.
    """
    source = files[0].resolve().parent
    # Data sets have files of the same names: each has a folder of its own.
    folder = target / f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    copies = [folder / file.name for file in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            todo = [(file, copy) for file, copy in zip(files, copies, strict=True) if not _is_copy(file, copy)]
            _check_space(todo, target)
            for file, copy in todo:
                _copy(file, copy)
    except OSError as error:
        raise ConfigError(f"data.copy_to={target}: cannot copy {source} there ({error})") from error
    return copies


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_copy(file: Path, copy: Path) -> bool:
    """As rsync sees it: the same size and time of change (which some file systems round)."""
    if not copy.exists():
        return False
    original, present = file.stat(), copy.stat()
    return original.st_size == present.st_size and abs(original.st_mtime - present.st_mtime) < 2


def _check_space(todo: Sequence[tuple[Path, Path]], target: Path) -> None:
    # What a copy replaces is only removed once it is complete.
    needed, free = sum(file.stat().st_size for file, _ in todo), shutil.disk_usage(target).free
    if needed > free:
        raise ConfigError(f"data.copy_to={target}: {needed / 1e9:.3g} GB needed, but {free / 1e9:.3g} GB are free")


def _copy(file: Path, copy: Path) -> None:
    print(f"copying {file} ({file.stat().st_size / 1e9:.3g} GB) to {copy}", file=sys.stderr, flush=True)
    start = time.monotonic()
    partial = copy.with_name(f".{copy.name}.part")
    try:
        shutil.copy2(file, partial)
        partial.replace(copy)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    print(f"copied in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
