"""A data set of images in files, for any loader."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from cnn.config import ImageFolder
from cnn.images.beton import import_ffcv, read_index, stage
from cnn.images.sampling import Crop, EpochOrder, Tickets, make_tickets, training_crop, validation_crop
from cnn.images.tree import CHANNELS, check_same_classes, read_tree
from common.config.config import ConfigError
from common.training.device import threads_per_process
from common.training.task import Batch


class Reader(Protocol):
    """A loader: decodes the images that tickets ask for."""

    def batches(self, tickets: Tickets, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield (images [B, 3, H, W] float32, labels [B] int64) on `device`, each valid until the next is drawn."""


class FileTrainData:
    """One rank's training images; nothing is opened before the first batch is drawn."""

    def __init__(self, reader: Reader, order: EpochOrder, batch_size: int, device: torch.device) -> None:
        self._reader, self._order, self.batch_size, self._device = reader, order, batch_size, device
        self.steps_per_epoch, self.batches_per_epoch = order.steps, order.batches

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Batch]:
        """Yield batches from number `start` on; each is valid until the next one is drawn."""
        return self._reader.batches(self._order.tickets(epoch, start, offset), self.batch_size, self._device)


@dataclass(frozen=True)
class Split:
    """The training or the validation images: their reader, number and classes."""

    reader: Reader
    images: int
    classes: list[str]


class ImageFolderData:
    """Image files as an `ImageData`.

    Raises ConfigError if files are missing or do not match the configuration.
    """

    channels, class_weights = CHANNELS, None

    def __init__(self, config: ImageFolder, seed: int) -> None:
        self._seed = seed
        self._train, self._validation = open_ffcv(config, seed) if config.loader == "ffcv" else open_trees(config, seed)
        self.train_size, self.classes = self._train.images, len(self._train.classes)
        try:
            check_same_classes(self._train.classes, self._validation.classes)
        except ValueError as error:
            raise ConfigError(f"data.folder={config.folder}: {error}") from error
        if config.classes not in (None, self.classes):
            raise ConfigError(f"data.classes={config.classes}: data.folder={config.folder} has {self.classes} classes")

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> FileTrainData:
        """Return this rank's share of every epoch's permutation."""
        order = EpochOrder(self.train_size, rank, ranks, batch_size, self._seed)
        return FileTrainData(self._train.reader, order, batch_size, device)

    def evaluation(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield batches of every `shards`-th validation image, starting with image `shard`; the last may be smaller."""
        tickets = make_tickets(np.arange(shard, self._validation.images, shards), epoch=0)
        return self._validation.reader.batches(tickets, batch_size, device) if len(tickets) else iter(())


def open_ffcv(config: ImageFolder, seed: int) -> list[Split]:
    """Open the training and validation .beton files, after copying them to this host if so configured."""
    files = [Path(config.folder) / f"{name}.beton" for name in (config.train, config.validation)]
    indices = [read_index(file) for file in files]
    try:
        import_ffcv()
    except ImportError as error:
        raise ConfigError(f"data.loader=ffcv: {error}") from error
    from cnn.images.ffcv_loader import FfcvReader

    if config.copy_to is not None:
        files = stage(files, Path(config.copy_to))
    return [
        Split(FfcvReader(file, crop, threads(config)), index.images, index.classes)
        for file, index, crop in zip(files, indices, crops(config, seed), strict=True)
    ]


def open_trees(config: ImageFolder, seed: int) -> list[Split]:
    """Open the training and validation folders."""
    from cnn.images.torchvision_loader import TorchvisionReader  # takes a second or two to import

    try:
        trees = [read_tree(Path(config.folder) / name) for name in (config.train, config.validation)]
    except ValueError as error:
        raise ConfigError(f"data.folder={config.folder}: {error}") from error
    return [
        Split(TorchvisionReader(tree, crop, threads(config)), len(tree.files), tree.classes)
        for tree, crop in zip(trees, crops(config, seed), strict=True)
    ]


def crops(config: ImageFolder, seed: int) -> tuple[Crop, Crop]:
    """Return the crops of training and of validation images."""
    return (
        training_crop(config.train_crop, config.scale, config.flip, seed),
        validation_crop(config.validation_crop, config.resize),
    )


def threads(config: ImageFolder) -> int:
    """Return the number of CPU threads that decode images in this process."""
    return config.workers or threads_per_process("RANK" in os.environ)
