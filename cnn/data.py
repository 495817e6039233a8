"""One interface to all image data sets; batches are (images [B, C, H, W] float32, labels [B] int64)."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from cnn.cifar10 import Cifar10Data
from cnn.config import CnnConfig
from cnn.digits import DigitsData
from cnn.in_memory import Images
from cnn.packaged import PackagedData
from common.training.task import TrainData


class ImageData(Protocol):
    """A data set, opened once in each process.

    The constructor raises ConfigError if the data is missing or does not match the configuration.
    """

    channels: int
    classes: int
    train_size: int  # images
    class_weights: Tensor | None  # [classes] of validation images, for the balanced accuracy; None: not recorded

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> TrainData:
        """Return rank `rank`'s augmented training images; must be cheap, since a simulation asks for every rank's."""

    def evaluation(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Images]:
        """Yield the batches of one shard of the validation images; every image is in exactly one shard."""


def open_data(config: CnnConfig) -> ImageData:
    """Open the configured data set."""
    match config.data.name:
        case "digits":
            return DigitsData(config.data, config.seed)
        case "cifar10":
            return Cifar10Data(config.data, config.seed)
        case "mnist_5k" | "openclipart":
            return PackagedData(config.data, config.seed)
        case "image_folder" | "imagenet" | "digits_images":
            from cnn.images.data import ImageFolderData  # imports numba where FFCV is installed: half a second

            return ImageFolderData(config.data, config.seed)
    raise AssertionError(config.data.name)
