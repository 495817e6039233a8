"""Digits: the split, the shares of the workers, the augmentation."""

import pytest
import torch

from cnn.data import InMemoryTrainData, random_shift
from cnn.digits import load_digits, with_label_noise
from common.config.config import ConfigError


def numbered(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose pixels and labels are their number."""
    labels = torch.arange(count)
    return labels.float()[:, None, None, None].expand(count, 1, 2, 2).contiguous(), labels


def unchanged(images: torch.Tensor) -> torch.Tensor:
    return images


def test_the_split_is_stratified_disjoint_and_always_the_same() -> None:
    (train, train_labels), (validation, validation_labels) = load_digits(0.2)
    assert (len(train), len(validation)) == (1437, 360)
    assert train.shape[1:] == validation.shape[1:] == (1, 8, 8)
    assert validation_labels.bincount().min() >= 34
    everything = torch.cat([train, validation]).flatten(1)
    assert torch.cat([train_labels, validation_labels]).bincount().sum() == 1797
    assert everything.mean().abs() < 1e-3
    assert abs(everything.std() - 1) < 1e-3
    assert torch.equal(load_digits(0.2)[1][0], validation)
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=1e-300: The test_size = 1"):
        load_digits(1e-300)


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 8), (7, 2)])
def test_workers_share_each_epoch_without_overlap_in_equal_steps(workers: int, batch_size: int) -> None:
    shares = [
        InMemoryTrainData(numbered(61), w, workers, batch_size, seed=3, augment=unchanged) for w in range(workers)
    ]
    epochs = []
    for epoch in range(2):
        batches = [list(share.epoch(epoch)) for share in shares]
        assert {len(b) for b in batches} == {61 // (workers * batch_size)} == {shares[0].steps_per_epoch}
        seen = torch.cat([labels for worker in batches for _, labels in worker])
        assert len(seen.unique()) == len(seen) == shares[0].steps_per_epoch * workers * batch_size
        assert all(torch.equal(images[:, 0, 0, 0], labels.float()) for worker in batches for images, labels in worker)
        epochs.append(seen)
    assert not torch.equal(epochs[0], epochs[1])


def test_an_epoch_can_be_entered_anywhere() -> None:
    data = InMemoryTrainData(numbered(60), 1, 2, 5, seed=0, augment=unchanged)
    whole = [labels for _, labels in data.epoch(4)]
    assert all(torch.equal(a, b) for (_, a), b in zip(data.epoch(4, start=2), whole[2:], strict=True))


def test_all_workers_together_see_the_same_global_batches_whatever_their_number() -> None:
    def global_batches(workers: int) -> list[list[int]]:
        shares = [
            InMemoryTrainData(numbered(64), w, workers, 16 // workers, seed=5, augment=unchanged)
            for w in range(workers)
        ]
        return [
            sorted(torch.cat([labels for _, labels in step]).tolist())
            for step in zip(*(s.epoch(0) for s in shares), strict=True)
        ]

    assert global_batches(1) == global_batches(2) == global_batches(8)


def test_too_few_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 x 8 images, but there are 15"):
        InMemoryTrainData(numbered(15), 0, 2, 8, seed=0, augment=unchanged)


def test_shift_moves_whole_images_by_at_most_one_pixel() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, 2, 6, 6)
    moved = random_shift(images, 1, "replicate")
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    kinds = set()
    for before, after in zip(padded, moved, strict=True):
        offsets = [(r, c) for r in range(3) for c in range(3) if torch.equal(before[:, r : r + 6, c : c + 6], after)]
        assert offsets
        kinds.add(offsets[0])
    assert len(kinds) == 9
    assert random_shift(images, 0, "replicate") is images


def test_label_noise_changes_as_many_labels_as_it_says_always_the_same() -> None:
    labels = torch.arange(10).repeat(100)
    noisy = with_label_noise(labels, 0.25, 10)
    assert (noisy != labels).sum() == 250
    assert (noisy.min(), noisy.max()) == (0, 9)
    assert torch.equal(noisy, with_label_noise(labels, 0.25, 10))
    assert torch.equal(with_label_noise(labels, 0.0, 10), labels)


def test_the_rest_of_an_epoch_is_dealt_to_fewer_workers() -> None:
    """Four workers take two batches each, then three the rest: together the sequence that one worker sees."""

    def drawn(workers: int, start: int = 0, offset: int = 0, rounds: int | None = None) -> list[list[int]]:
        shares = [InMemoryTrainData(numbered(71), w, workers, 3, 5, unchanged) for w in range(workers)]
        each = [[labels.tolist() for _, labels in share.epoch(2, start, offset)] for share in shares]
        return [batch for together in list(zip(*each, strict=True))[:rounds] for batch in together]

    whole = drawn(1)
    assert drawn(4, rounds=2) + drawn(3, offset=8) == whole[:23]
    assert drawn(3, start=2, offset=8) == whole[14:23]
