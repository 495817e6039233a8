"""CIFAR-10 (Krizhevsky 2009) as a data set in memory; torchvision reads and checks its files."""

import shlex
from functools import partial

import torch
from torch import Tensor

from cnn.config import Cifar10
from cnn.data import Images, InMemory, normalise_channels, random_flip, random_shift
from common.config.config import ConfigError

ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
# Red, green and blue, from 0 to 255, as in the CIFAR-10 script of arXiv 2110.13363 (and many others). The deviations
# are roughly the deviations within one image; over all pixels of the training images they are 63.0, 62.1, 66.7.
MEAN = tuple(255 * level for level in (0.4914, 0.4822, 0.4465))
STD = tuple(255 * level for level in (0.2023, 0.1994, 0.2010))

BATCHES = "cifar-10-batches-py"


def missing_cifar10(folder: str) -> ConfigError:
    """Return the error that says how to get the files."""
    typed = shlex.quote(folder)
    return ConfigError(
        f"data.folder={folder}: {folder}/{BATCHES} is missing or not complete; expected the content of {ARCHIVE}: "
        f"`mkdir -p {typed} && curl -L {ARCHIVE} | tar -xz -C {typed}` puts it there"
    )


def load_cifar10(folder: str) -> tuple[Images, Images]:
    """Load (training, validation) from FOLDER/cifar-10-batches-py: uint8 [N, 3, 32, 32], labels [N] int64.

    Raises ConfigError if files are missing or differ from the published ones.
    """
    from cnn.torchvision_shim import torchvision  # takes a second or two to import

    try:
        splits = [torchvision.datasets.CIFAR10(folder, train=train) for train in (True, False)]
    except RuntimeError as error:  # torchvision compares checksums
        raise missing_cifar10(folder) from error
    train, validation = (
        (torch.as_tensor(split.data).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(split.targets))
        for split in splits
    )
    return train, validation


def normalise(images: Tensor) -> Tensor:
    """Scale uint8 [B, 3, H, W] to float32; over all training images each channel has mean 0."""
    return normalise_channels(images, MEAN, STD)


def augment(images: Tensor, shift: int, flip: bool) -> Tensor:
    """Shift images [B, 3, H, W] at random by up to `shift` pixels, mirror half of them if `flip`, and normalise."""
    shifted = random_shift(images, shift, "constant")
    return normalise(random_flip(shifted) if flip else shifted)


class Cifar10Data(InMemory):
    """CIFAR-10 as an `ImageData`."""

    channels, classes = 3, 10

    def __init__(self, config: Cifar10, seed: int) -> None:
        changed = partial(augment, shift=config.shift, flip=config.flip)
        super().__init__(*load_cifar10(config.folder), seed, changed, normalise)
