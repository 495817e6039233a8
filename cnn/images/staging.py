"""Copying data files to this host's local disk."""

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common.config.config import ConfigError


def stage(files: Sequence[Path], target: Path) -> list[Path]:
    """Copy the files below `target`, unless complete copies exist, and return the paths of the copies.

    Every process of a host calls it: one copies while the others wait for its lock, which the system releases if that
    process dies. A copy gets its final name and the source's modification time only when it is complete. Raises
    ConfigError if the copies do not fit or cannot be written.
    """
    source = files[0].resolve().parent
    # Files of different data sets share names, so each data set has its own folder.
    folder = target / f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    copies = [folder / file.name for file in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            _remove_partial_copies(folder, target)
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
    """Compare size and modification time as rsync does; some file systems round the time."""
    if not copy.exists():
        return False
    original, present = file.stat(), copy.stat()
    return original.st_size == present.st_size and abs(original.st_mtime - present.st_mtime) < 2


def _remove_partial_copies(folder: Path, target: Path) -> None:
    """Remove partial files of killed processes: in `folder`, whose lock is held, and of data sets not being copied."""
    for partial in target.glob(f"*-{'[0-9a-f]' * 8}/.*.part"):
        with suppress(OSError), (partial.parent / ".lock").open("a") as handle:  # being copied, or another user's
            if partial.parent != folder:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink(missing_ok=True)


def _check_space(todo: Sequence[tuple[Path, Path]], target: Path) -> None:
    # An old copy is removed only when its replacement is complete, so both need space.
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
