"""Small trees of images for tests, and what reads them."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

HAS_FFCV = find_spec("ffcv") is not None
needs_ffcv = pytest.mark.skipif(not HAS_FFCV, reason="FFCV is not installed (see `make env`)")
LOADERS = [pytest.param("ffcv", marks=needs_ffcv), "torchvision"]


def smooth_image(random: np.random.Generator, height: int, width: int) -> Image.Image:
    """Coarse noise, enlarged: it survives resizing, and no two are alike."""
    noise = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return noise.resize((width, height), Image.Resampling.BICUBIC)


def write_tree(folder: Path, classes: dict[str, int], seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """Write FOLDER/<class>/<number>.png of many sizes; returns (pixels [H, W, 3], label) in the tree's order."""
    random = np.random.default_rng(seed)
    images = []
    for label, (name, count) in enumerate(sorted(classes.items())):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            height, width = random.integers(36, 90, 2)
            image = smooth_image(random, int(height), int(width))
            image.save(folder / name / f"{number:03d}.png")
            images.append((np.asarray(image), label))
    return images
