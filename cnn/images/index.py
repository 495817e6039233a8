"""What is known of a .beton file beside it: FILE.beton.json."""

from pathlib import Path

from pydantic import ValidationError

from common.training.atomic import write_atomically
from common.training.config import ConfigError, Strict


class BetonIndex(Strict):
    """A complete .beton file: classes in the order of their labels, how it was made, its length.

    converted: how many images were not RGB, by their mode; skipped: files that could not be decoded
    """

    classes: list[str]
    counts: list[int]  # images of each class
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
        """Images in the file."""
        return sum(self.counts)


def index_file(beton: Path) -> Path:
    """Where the index of a .beton file lies."""
    return beton.with_name(f"{beton.name}.json")


def write_index(beton: Path, index: BetonIndex) -> None:
    """Atomically; it is written last, so it says that the .beton file is complete."""
    write_atomically(index_file(beton), (index.model_dump_json(indent=2) + "\n").encode())


def read_index(beton: Path) -> BetonIndex:
    """The index of a complete .beton file; ConfigError if the file is missing or not what the index describes."""
    command = f"`python -m cnn.prepare source=IMAGES output={beton.parent}` makes it"
    missing = [str(file) for file in (beton, index_file(beton)) if not file.is_file()]
    if missing:
        raise ConfigError(f"data.folder={beton.parent}: {missing[0]} is missing; {command} from folders of images")
    try:
        index = BetonIndex.model_validate_json(index_file(beton).read_text())
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{index_file(beton)}: not an index of this version; {command} anew") from error
    size = beton.stat().st_size
    if size != index.bytes:
        raise ConfigError(f"{beton}: has {size} bytes, expected {index.bytes}; {command} anew")
    return index
