"""scikit-learn's handwritten digits, held in memory: real images without a download."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cnn.config import Digits
from cnn.data import Images
from cnn.partition import dirichlet_partition

SPLIT_SEED = 0  # the split is part of the data set, not of the run
MEAN, STD = 4.884, 6.017  # of all pixels of the digits, which run from 0 to 16


def load_digits(validation_fraction: float) -> tuple[Images, Images]:
    """scikit-learn's digits, normalised, as (training, validation); stratified by class, always the same split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.as_tensor((digits.images - MEAN) / STD, dtype=torch.float32).unsqueeze(1)
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    train, validation = train_test_split(
        range(len(labels)), test_size=validation_fraction, random_state=SPLIT_SEED, stratify=digits.target
    )
    return (images[train], labels[train]), (images[validation], labels[validation])


def with_label_noise(labels: Tensor, fraction: float, classes: int) -> Tensor:
    """Give this fraction of the labels [N] another class, drawn uniformly; always the same ones."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    wrong = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    offsets = torch.randint(1, classes, (len(wrong),), generator=generator)
    noisy = labels.clone()
    noisy[wrong] = (labels[wrong] + offsets) % classes
    return noisy


class DigitsData:
    """The digits as an ImageData. What makes them harder acts on the training images only."""

    channels, classes = 1, 10

    def __init__(self, config: Digits, seed: int) -> None:
        self._config, self._seed = config, seed
        (images, labels), self._validation = load_digits(config.validation_fraction)
        self._train = images, with_label_noise(labels, config.label_noise, self.classes)
        self._shares: list[Tensor] = []
        self.train_size = len(labels)

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> "InMemoryTrainData":
        """All ranks share all images (partition=iid), or each has images of its own (partition=dirichlet)."""
        images, labels = self._train
        data = images.to(device), labels.to(device)
        if self._config.partition == "iid":
            return InMemoryTrainData(data, rank, ranks, batch_size, self._seed, self._config.shift)
        if len(self._shares) != ranks:
            self._shares = dirichlet_partition(labels, ranks, self._config.alpha, self._seed)
        own = self._shares[rank].to(device)
        return InMemoryTrainData(
            (data[0][own], data[1][own]), 0, 1, batch_size, self._seed * 1009 + rank, self._config.shift
        )

    def evaluation(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Images]:
        """Every `shards`-th validation image, beginning with number `shard`."""
        images, labels = (tensor[shard::shards].to(device) for tensor in self._validation)
        return zip(images.split(batch_size), labels.split(batch_size), strict=True) if len(labels) else iter(())


class InMemoryTrainData:
    """One worker's share of images that lie in memory, shuffled each epoch, each image moved a little.

    In every epoch one permutation of all images, drawn from (seed, epoch), is dealt out to the workers in local
    batches; images that do not fill a batch on every worker wait for another epoch.

    Raises ValueError if there are fewer images than one global batch.
    """

    def __init__(
        self,
        images: Images,
        worker: int,
        workers: int,
        batch_size: int,
        seed: int,
        shift: int,
    ) -> None:
        self._images, self._labels = images
        self._worker, self._workers, self._batch_size = worker, workers, batch_size
        self._seed, self._shift = seed, shift
        self.steps_per_epoch = len(self._labels) // (workers * batch_size)
        if self.steps_per_epoch == 0:
            raise ValueError(f"a global batch of {workers} x {batch_size} images, but there are {len(self._labels)}")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Images]:
        """Batches from number `start` on."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._labels), generator=generator)
        for step in range(start, self.steps_per_epoch):
            first = (step * self._workers + self._worker) * self._batch_size
            chosen = order[first : first + self._batch_size].to(self._labels.device)
            yield random_shift(self._images[chosen], self._shift), self._labels[chosen]


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Move each image [B, C, H, W] by up to `pixels` in both directions, filling with the border's value.

    Draws from torch's global generator: the worker's own stream.
    """
    if pixels == 0:
        return images
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4, mode="replicate")
    top, left = torch.randint(0, 2 * pixels + 1, (2, batch)).to(images.device)
    rows = (top[:, None] + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width, device=images.device))[:, None, None, :]
    samples = torch.arange(batch, device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[samples, channels, rows, columns]
