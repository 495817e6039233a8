"""One interface to all image data sets, and data sets held in memory, which are augmented on their device."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from common.training.task import TrainData, dealt
from common.transfer import to_device

Images = tuple[Tensor, Tensor]  # images [B, C, H, W], labels [B] int64


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


class InMemoryTrainData:
    """One worker's share of images held in memory, shuffled each epoch; `augment` transforms each batch.

    In every epoch one permutation of all images, drawn from (seed, epoch), is dealt to the workers in local batches.
    Images that do not fill a batch on every worker are left out of that epoch.

    Raises ValueError if there are fewer images than one global batch.
    """

    def __init__(
        self, images: Images, worker: int, workers: int, batch_size: int, seed: int, augment: Callable[[Tensor], Tensor]
    ) -> None:
        self._images, self._labels = images
        self._worker, self._workers, self.batch_size = worker, workers, batch_size
        self._seed, self._augment = seed, augment
        self.batches_per_epoch = len(self._labels) // batch_size
        self.steps_per_epoch = self.batches_per_epoch // workers
        if self.steps_per_epoch == 0:
            raise ValueError(f"a global batch of {workers} x {batch_size} images, but there are {len(self._labels)}")

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Images]:
        """Yield this worker's batches of the epoch from number `start` on, after the first `offset` of all workers."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = to_device(torch.randperm(len(self._labels), generator=generator), self._labels.device)
        for number in dealt(self.batches_per_epoch, self._worker, self._workers, start, offset):
            first = number * self.batch_size
            chosen = order[first : first + self.batch_size]
            yield self._augment(self._images[chosen]), self._labels[chosen]


class InMemory:
    """Images [N, C, H, W], usually as bytes: an `ImageData` with one copy on the device, shared by all workers.

    augment:   turns a training batch into the network's input
    normalise: turns a validation batch into the network's input
    """

    class_weights: Tensor | None = None

    def __init__(
        self,
        train: Images,
        validation: Images,
        seed: int,
        augment: Callable[[Tensor], Tensor],
        normalise: Callable[[Tensor], Tensor],
    ) -> None:
        self._train, self._validation = train, validation
        self._seed, self._augment, self._normalise = seed, augment, normalise
        self.train_size = len(train[1])

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> InMemoryTrainData:
        """Return rank `rank`'s batches; all ranks draw from the same images."""
        self._train = _on(self._train, device)
        return InMemoryTrainData(self._train, rank, ranks, batch_size, self._seed, self._augment)

    def evaluation(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Images]:
        """Yield batches of every `shards`-th validation image, starting with image `shard`."""
        self._validation = _on(self._validation, device)
        images, labels = (tensor[shard::shards] for tensor in self._validation)
        for first in range(0, len(labels), batch_size):
            batch = slice(first, first + batch_size)
            yield self._normalise(images[batch]), labels[batch]


def _on(images: Images, device: torch.device) -> Images:
    """Move images and labels to `device`, without a copy if they are already there."""
    pixels, labels = images
    return pixels.to(device), labels.to(device)


def random_shift(images: Tensor, pixels: int, fill: Literal["replicate", "constant"]) -> Tensor:
    """Shift each image [B, C, H, W] by up to `pixels` in either direction, filling with border values or zeros.

    The shifts come from torch's global generator, which is the worker's own stream.
    """
    if pixels == 0:
        return images
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4, mode=fill)
    top, left = to_device(torch.randint(0, 2 * pixels + 1, (2, batch)), images.device)
    rows = (top[:, None] + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width, device=images.device))[:, None, None, :]
    samples = torch.arange(batch, device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[samples, channels, rows, columns]


def random_flip(images: Tensor) -> Tensor:
    """Mirror every image [B, C, H, W] with probability 1/2, drawn from torch's global generator."""
    mirrored = to_device(torch.rand(len(images)) < 0.5, images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def normalise_channels(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract each channel's mean from uint8 [B, C, H, W] and divide by its deviation; float32 on the same device."""
    return images.float().sub_(_channels(mean, images.device)).div_(_channels(std, images.device))


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a number for each channel, [C, 1, 1] float32, made only once: the host waits while it is copied."""
    return torch.tensor(values, device=device)[:, None, None]
