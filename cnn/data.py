"""Image data sets behind one interface: batches are (images [B, C, H, W] float32, labels [B] int64)."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from cnn.config import CnnConfig
from common.training.task import TrainData

Images = tuple[Tensor, Tensor]


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
            from cnn.digits import DigitsData

            return DigitsData(config.data, config.seed)
        case "cifar10":
            from cnn.cifar10 import Cifar10Data

            return Cifar10Data(config.data, config.seed)
        case "image_folder" | "imagenet" | "digits_images":
            from cnn.images.data import ImageFolderData

            return ImageFolderData(config.data, config.seed)
    raise AssertionError(config.data.name)
