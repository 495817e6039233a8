"""Image data sets behind one interface: batches are (images [B, C, H, W] float32, labels [B] int64)."""

from collections.abc import Iterator
from typing import Protocol

import torch

from cnn.cifar10 import Cifar10Data
from cnn.config import CnnConfig
from cnn.digits import DigitsData
from cnn.in_memory import Images
from common.training.task import TrainData


class ImageData(Protocol):
    """A data set, opened once in each process. The constructor raises ConfigError if it is missing or does not fit."""

    channels: int
    classes: int
    train_size: int  # images

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> TrainData:
        """Rank `rank`'s share of the training images, augmented. Cheap: a simulation asks for every rank's."""

    def evaluation(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Images]:
        """This shard of the validation images; the shards together hold each exactly once."""


def open_data(config: CnnConfig) -> ImageData:
    """The configured data set."""
    match config.data.name:
        case "digits":
            return DigitsData(config.data, config.seed)
        case "cifar10":
            return Cifar10Data(config.data, config.seed)
        case "image_folder" | "imagenet" | "digits_images":
            from cnn.images.data import ImageFolderData  # imports numba where FFCV is installed: half a second

            return ImageFolderData(config.data, config.seed)
    raise AssertionError(config.data.name)
