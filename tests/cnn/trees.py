"""Small trees of images for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


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
