"""scikit-learn's digits as image files: a small data set in ImageNet's form, without a download."""

import shutil
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from cnn.digits import MEAN, STD, load_digits
from common.atomic import temporary

PIXELS = 32
VALIDATION_FRACTION = 0.2  # the split of configs/data/digits.yaml


def write_digits(train: Path, validation: Path) -> None:
    """Write FOLDER/<digit>/<number>.png in RGB, enlarged from 8 x 8 to 32 x 32 pixels.

    A folder appears only when it is complete, and replaces an older one.
    """
    for folder, (images, labels) in zip((train, validation), load_digits(VALIDATION_FRACTION), strict=True):
        part = temporary(folder, "part")
        try:
            for label in labels.unique().tolist():
                (part / str(label)).mkdir(parents=True)
            levels = ((images.squeeze(1) * STD + MEAN) * 255 / 16).round().byte()  # levels run from 0 to 16
            shown = tqdm(levels, folder.name, unit="image")
            for number, (pixels, label) in enumerate(zip(shown, labels, strict=True)):
                image = Image.fromarray(pixels.numpy()).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
                image.convert("RGB").save(part / str(label.item()) / f"{number:04d}.png")
            shutil.rmtree(folder, ignore_errors=True)
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
