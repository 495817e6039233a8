"""scikit-learn's handwritten digits as a data set in memory: real images without a download."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from cnn.config import Digits
from cnn.data import Images, InMemory, InMemoryTrainData, random_shift
from common.config.config import ConfigError

SPLIT_SEED = 0  # the split is part of the data set, not of the run
MEAN, STD = 4.884, 6.017  # of all pixels, whose levels run from 0 to 16


def load_digits(validation_fraction: float) -> tuple[Images, Images]:
    """Load scikit-learn's digits, normalised, as (training, validation): a fixed split, stratified by class.

    Raises ConfigError if a part would be too small.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.as_tensor((digits.images - MEAN) / STD, dtype=torch.float32).unsqueeze(1)
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    try:
        train, validation = train_test_split(
            range(len(labels)), test_size=validation_fraction, random_state=SPLIT_SEED, stratify=digits.target
        )
    except ValueError as error:
        raise ConfigError(f"data.validation_fraction={validation_fraction}: {error}") from error
    return (images[train], labels[train]), (images[validation], labels[validation])


def with_label_noise(labels: Tensor, fraction: float, classes: int) -> Tensor:
    """Return labels [N] with a fixed `fraction` of them replaced by another class, drawn uniformly."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    wrong = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    offsets = torch.randint(1, classes, (len(wrong),), generator=generator)
    noisy = labels.clone()
    noisy[wrong] = (labels[wrong] + offsets) % classes
    return noisy


def dirichlet_partition(labels: Tensor, ranks: int, alpha: float, seed: int) -> list[Tensor]:
    """Return the indices of each rank's images: disjoint sets of equal size, with fewer than `ranks` left over.

    Each rank's class distribution is drawn from Dirichlet(alpha) as in Hsu, Qi and Brown (arXiv 1909.06335): a large
    alpha gives every rank the same mixture, a small one a class or two each. When a class is used up, its weight goes
    to the others.

    labels [N] int64. The same arguments give the same partition. Raises ValueError if there are fewer images than
    ranks.
    """
    size = len(labels) // ranks
    if size == 0:
        raise ValueError(f"{len(labels)} images for {ranks} ranks: expected at least one for each")
    random = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    # Shuffled, so that popping from a pool is a random draw from its class.
    shuffled = random.permutation(len(labels))
    pools = [shuffled[labels.numpy()[shuffled] == c].tolist() for c in range(classes)]
    weights = random.dirichlet([alpha] * classes, ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # One image each in turn, so that no rank is left with the remainder.
    for _ in range(size):
        for rank, share in enumerate(shares):
            available = np.array([bool(pool) for pool in pools])
            odds = np.maximum(weights[rank], np.finfo(float).tiny) * available  # the tiny weight keeps odds positive
            share.append(pools[random.choice(classes, p=odds / odds.sum())].pop())
    return [torch.tensor(share) for share in shares]


class DigitsData(InMemory):
    """The digits as an `ImageData`; label noise, shifts and partitions apply to the training images only."""

    channels, classes = 1, 10

    def __init__(self, config: Digits, seed: int) -> None:
        (images, labels), validation = load_digits(config.validation_fraction)
        train = images, with_label_noise(labels, config.label_noise, self.classes)
        augment = partial(random_shift, pixels=config.shift, fill="replicate")
        super().__init__(train, validation, seed, augment, normalise=lambda normalised: normalised)
        self._config = config
        self._shares: list[Tensor] = []

    def train(self, rank: int, ranks: int, batch_size: int, device: torch.device) -> InMemoryTrainData:
        """Return rank `rank`'s batches, from all images (partition=iid) or from its share (partition=dirichlet)."""
        if self._config.partition == "iid":
            return super().train(rank, ranks, batch_size, device)
        images, labels = self._train
        if len(self._shares) != ranks:
            self._shares = dirichlet_partition(labels, ranks, self._config.alpha, self._seed)
        own = self._shares[rank]
        data = images[own].to(device), labels[own].to(device)
        return InMemoryTrainData(data, 0, 1, batch_size, self._seed * 1009 + rank, self._augment)
