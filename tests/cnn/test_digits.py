"""Shares of images by class: equal, disjoint, as different as alpha says."""

import pytest
import torch

from cnn.digits import DigitsData, dirichlet_partition
from common.launch.compose import compose_config

LABELS = torch.arange(1437) % 10


@pytest.mark.parametrize(("ranks", "alpha"), [(1, 1.0), (3, 0.01), (32, 0.01)])
def test_shares_are_equal_and_disjoint(ranks: int, alpha: float) -> None:
    shares = dirichlet_partition(LABELS, ranks, alpha, seed=1)
    assert {len(share) for share in shares} == {len(LABELS) // ranks}
    everything = torch.cat(shares)
    assert len(everything.unique()) == len(everything)


def heterogeneity(alpha: float) -> float:
    """Mean total variation distance between a rank's classes and those of all, 0 to 0.9."""
    counts = torch.stack([LABELS[s].bincount(minlength=10) for s in dirichlet_partition(LABELS, 16, alpha, seed=2)])
    return float((counts / counts.sum(1, keepdim=True) - 0.1).abs().sum(1).mean() / 2)


def test_a_smaller_alpha_makes_ranks_differ_more() -> None:
    distances = [heterogeneity(alpha) for alpha in (0.05, 0.5, 5.0, 1000.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.6
    assert distances[-1] < 0.15


def test_deterministic_in_the_seed() -> None:
    first, again, other = (torch.stack(dirichlet_partition(LABELS, 4, 0.5, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_fewer_images_than_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 images for 4 ranks"):
        dirichlet_partition(LABELS[:3], 4, 1.0, 0)


def test_ranks_draw_only_their_own_images() -> None:
    config = compose_config("cnn", ["data.partition=dirichlet", "data.alpha=0.1", "data.shift=0"])
    data = DigitsData(config.data, seed=0)
    shares = [data.train(rank, 4, 16, torch.device("cpu")) for rank in range(4)]
    assert {stream.steps_per_epoch for stream in shares} == {1437 // 4 // 16}
    seen = [{image.numpy().tobytes() for e in range(2) for images, _ in s.epoch(e) for image in images} for s in shares]
    for i in range(4):
        assert all(seen[i].isdisjoint(seen[j]) for j in range(i))
