"""Image files: folders of them by class, decoding, and normalising to network inputs."""

import functools
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from cnn.data import normalise_channels

# What Pillow raises for files that are not images, truncated, or absurdly large.
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
# Red, green and blue of ImageNet's training images, in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHANNELS = 3

MEAN_LEVEL, STD_LEVEL = (255 * np.array(value, dtype=np.float32) for value in (MEAN, STD))
LEVELS = tuple(MEAN_LEVEL.tolist()), tuple(STD_LEVEL.tolist())


@dataclass(frozen=True)
class ImageTree:
    """Images in class folders. Classes and files are in alphabetical order; labels[i] is the class of files[i]."""

    classes: list[str]
    files: list[str]
    labels: list[int]


def read_tree(folder: Path) -> ImageTree:
    """List the images in folder/<class>/; warn how many entries are left out: hidden or not of a known kind.

    Raises ValueError if there are none, a class has none, a class is not named in UTF-8, or a link leads back to a
    folder above it.
    """
    from cnn.torchvision_shim import torchvision  # takes a second or two to import

    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; expected one that holds a folder of images for each class")
    folders = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    classes = [name for name in folders if not name.startswith(".")]
    if not classes:
        raise ValueError(f"{folder}: expected a folder of images for each class, found no folders in it")
    if unreadable := [name for name in classes if name != readable(name)]:
        raise ValueError(f"{folder}: expected folders named in UTF-8, found {readable(unreadable[0])}")
    left_out = [str(folder / name) for name in folders if name.startswith(".")]
    kinds = torchvision.datasets.folder.IMG_EXTENSIONS

    def taken(file: str) -> bool:
        hidden = any(part.startswith(".") for part in Path(file).relative_to(folder).parts)
        if hidden or not file.lower().endswith(kinds):
            left_out.append(file)
            return False
        check_links(Path(file).parent)
        return True

    @functools.cache
    def check_links(below: Path) -> None:
        above = below.relative_to(folder).parents
        if len({(folder / path).resolve() for path in (below, *above)}) <= len(above):
            raise ValueError(f"{below}: a link leads back to a folder above it; expected each image once")

    numbers = {name: label for label, name in enumerate(classes)}
    try:
        found = torchvision.datasets.DatasetFolder.make_dataset(str(folder), numbers, is_valid_file=taken)
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: {error} (expected one of {', '.join(kinds)})") from error
    if left_out:
        logging.warning("%s: %d skipped (hidden or of another type), such as %s", folder, len(left_out), left_out[0])
    files, labels = zip(*found, strict=True)
    return ImageTree(classes, list(files), list(labels))


def readable(name: str) -> str:
    """Return the name of a file for people, with marks in place of bytes that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def check_same_classes(train: Sequence[str], validation: Sequence[str]) -> None:
    """Raise ValueError if training and validation images do not have the same classes."""
    differences = [
        f"{', '.join(sorted(missing)[:5])}{', ...' if len(missing) > 5 else ''} only in the {where} images"
        for where, missing in (("training", set(train) - set(validation)), ("validation", set(validation) - set(train)))
        if missing
    ]
    if differences:
        raise ValueError(f"expected the same classes in both, but {'; '.join(differences)}")


def read_rgb(file: str | Path) -> tuple[Image.Image, str]:
    """Read an image as RGB, and return it with its mode in the file (RGB, L, P, CMYK, ...).

    Raises one of BROKEN if it cannot be decoded, or if none of its content would survive.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError("not a file but a pipe or the like, which might never answer")
    with Image.open(file) as image:
        mode, kind = image.mode, image.format
        image.load()
    if mode == "RGB":
        return image, mode
    if mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PPM")):  # 0 to 65535; Pillow would clip at 255
        image = Image.fromarray(np.asarray(image).astype(np.int32))
        levels = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif mode in ("I", "F"):
        raise ValueError(f"mode {mode} does not say which levels are black and white; expected 8 or 16 bits")
    else:
        levels = image = (
            image.convert("RGBA") if mode == "P" else image
        )  # Pillow asks for this, as a palette may be transparent
    rgb = levels.convert("RGB")
    if is_flat(rgb) and not is_flat(image):
        raise ValueError(f"mode {mode}: as RGB it would have one colour only; expected 8 bits that hold the content")
    return rgb, mode


def is_flat(image: Image.Image) -> bool:
    """Decide whether all pixels are equal."""
    extrema = image.getextrema()
    return all(low == high for low, high in (extrema if isinstance(extrema[0], tuple) else [extrema]))


def normalise(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Normalise uint8 [..., 3] to float32, in the calling thread only."""
    levels = image - MEAN_LEVEL
    levels /= STD_LEVEL
    return levels


def normalise_tensor(images: Tensor) -> Tensor:
    """Normalise uint8 [B, 3, H, W] to float32, keeping device and memory format."""
    return normalise_channels(images, *LEVELS)
