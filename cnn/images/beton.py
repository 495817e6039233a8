"""FFCV's .beton files, without FFCV: its optional import, the index next to each file, copies on local disk."""

import hashlib
import importlib
import shlex
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError

from common.atomic import write_atomically
from common.config.base import Strict
from common.config.config import ConfigError
from common.locks import exclusive

WHAT_TO_DO = (
    "`make env` installs it where it finds a C++ compiler, OpenCV and libjpeg-turbo (Debian: build-essential "
    "pkg-config libopencv-dev libturbojpeg0-dev); data.loader=torchvision reads folders of images without it"
)
HEADER = struct.Struct("<HHIQQ")  # FFCV's: version, fields, bytes of a page, images, where the table of images begins
VERSION = 2


def import_ffcv() -> None:
    """Import FFCV, which takes seconds. Raises ImportError saying how to install it."""
    with torch_threads_kept():
        try:
            importlib.import_module("ffcv")
        except ImportError as error:
            raise ImportError(f"FFCV cannot be imported ({error}). {WHAT_TO_DO}") from error


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore PyTorch's number of threads after the block; FFCV sets it to its own."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class BetonIndex(Strict):
    """Description of a complete .beton file: its classes in the order of their labels, how it was made, its size.

    counts:    images of each class
    converted: number of images converted to RGB, by original mode
    skipped:   files that could not be decoded
    bytes:     size of the .beton file
    """

    classes: list[str]
    counts: list[int]
    source: str
    resolution: int | None
    quality: int
    write_mode: str
    compress_probability: float
    converted: dict[str, int]
    skipped: list[str]
    bytes: int

    @property
    def images(self) -> int:
        """Number of images in the file."""
        return sum(self.counts)


def index_file(beton: Path) -> Path:
    """Return the path of a .beton file's index."""
    return beton.with_name(f"{beton.name}.json")


def write_index(beton: Path, index: BetonIndex) -> None:
    """Write the index atomically; it is written last, so its presence means that the .beton file is complete."""
    write_atomically(index_file(beton), (index.model_dump_json(indent=2) + "\n").encode())


def check_present(beton: Path) -> str:
    """Return the command that makes a .beton file. Raises ConfigError if it or its index is missing."""
    command = f"`python -m cnn.prepare source=IMAGES {shlex.quote(f'output={beton.parent}')}` makes it"
    missing = [str(file) for file in (beton, index_file(beton)) if not file.is_file()]
    if missing:
        raise ConfigError(f"data.folder={beton.parent}: {missing[0]} is missing; {command} from folders of images")
    return command


def read_index(beton: Path) -> BetonIndex:
    """Read the index of a .beton file.

    Raises ConfigError if one of the two files is missing, if the index is invalid, or if the .beton file's size or
    header does not match it.
    """
    command = check_present(beton)
    try:
        index = BetonIndex.model_validate_json(index_file(beton).read_text())
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{index_file(beton)}: not an index of this version; {command} anew") from error
    size = beton.stat().st_size
    if size != index.bytes:
        raise ConfigError(f"{beton}: has {size} bytes, expected {index.bytes}; {command} anew")
    with beton.open("rb") as stream:
        head = stream.read(HEADER.size).ljust(HEADER.size, b"\0")
    version, _, _, images, _ = HEADER.unpack(head)
    if (version, images) != (VERSION, index.images):
        raise ConfigError(f"{beton}: is damaged, expected a file of FFCV with {index.images} images; {command} anew")
    return index


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
        with exclusive(folder / ".lock"):
            for partial in folder.glob(".*.part"):  # left by killed processes
                partial.unlink()
            todo = [(file, copy) for file, copy in zip(files, copies, strict=True) if not _is_copy(file, copy)]
            _check_space(todo, target)
            for file, copy in todo:
                _copy(file, copy)
    except OSError as error:
        raise ConfigError(f"data.copy_to={target}: cannot copy {source} there ({error})") from error
    return copies


def _is_copy(file: Path, copy: Path) -> bool:
    """Compare size and modification time as rsync does; some file systems round the time."""
    if not copy.exists():
        return False
    original, present = file.stat(), copy.stat()
    return original.st_size == present.st_size and abs(original.st_mtime - present.st_mtime) < 2


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
