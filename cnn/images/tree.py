"""Reading folders of images by class, and single images."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

# What Pillow raises for files that are not images, truncated, or absurdly large.
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@dataclass(frozen=True)
class ImageTree:
    """Images in class folders. Classes and files are in alphabetical order; labels[i] is the class of files[i]."""

    classes: list[str]
    files: list[str]
    labels: list[int]


def read_tree(folder: Path) -> ImageTree:
    """List the images in folder/<class>/. Raises ValueError if there are none or a class has none."""
    from cnn.torchvision_shim import torchvision  # takes a second or two to import

    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; expected one that holds a folder of images for each class")
    try:
        found = torchvision.datasets.ImageFolder(str(folder))
    except FileNotFoundError as error:
        if any(entry.is_dir() for entry in os.scandir(folder)):
            raise ValueError(f"{folder}: {str(error).split('. Supported')[0]}") from error
        raise ValueError(f"{folder}: expected a folder of images for each class, found no folders in it") from error
    files, labels = zip(*found.samples, strict=True)
    return ImageTree(found.classes, list(files), list(labels))


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

    Raises one of BROKEN if it cannot be decoded.
    """
    with Image.open(file) as image:
        mode = image.mode
        image.load()
    if mode == "P":
        image = image.convert("RGBA")  # Pillow's way to convert palettes with transparency
    return image if mode == "RGB" else image.convert("RGB"), mode
