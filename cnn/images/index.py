"""FILE.beton.json, the description kept beside each .beton file."""

import shlex
import struct
from pathlib import Path

from pydantic import ValidationError

from common.atomic import write_atomically
from common.config.base import Strict
from common.config.config import ConfigError

HEADER = struct.Struct("<HHIQQ")  # FFCV's: version, fields, bytes of a page, images, where the table of images begins
VERSION = 2


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

    Raises ConfigError if one of the two files is missing, or the .beton file does not have the recorded size or begins
    otherwise than one of as many images.
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
