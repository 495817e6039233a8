"""Crops: the law of torchvision's RandomResizedCrop, the same in Python and in compiled code."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from cnn.images.sampling import (
    RATIO,
    EpochOrder,
    central_crop,
    flipped,
    make_tickets,
    mix,
    random_resized_crop,
    sample_key,
    training_crop,
    uniform,
    validation_crop,
)
from cnn.torchvision_shim import torchvision

DRAWS = 3000


@pytest.fixture(autouse=True)
def wraps_around():
    with np.errstate(over="ignore"):
        yield


def keys(count: int, seed: int = 0, epoch: int = 0) -> list[np.uint64]:
    return [sample_key(np.uint64(seed), ticket) for ticket in make_tickets(np.arange(count), epoch)]


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of its reference implementation for seed 0.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    outputs = [mix(np.uint64(number) * gamma) for number in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_draws_are_uniform_and_independent() -> None:
    columns = {
        "first": [uniform(key, 0) for key in keys(DRAWS)],
        "second": [uniform(key, 1) for key in keys(DRAWS)],
        "last": [uniform(key, 40) for key in keys(DRAWS)],
        "next epoch": [uniform(key, 0) for key in keys(DRAWS, epoch=1)],
        "next seed": [uniform(key, 0) for key in keys(DRAWS, seed=1)],
    }
    for name, values in columns.items():
        assert stats.kstest(values, "uniform").pvalue > 1e-3, name
    correlations = np.corrcoef(list(columns.values())) - np.eye(len(columns))
    assert np.abs(correlations).max() < 4 / DRAWS**0.5
    assert 0.46 < np.mean([flipped(key) for key in keys(DRAWS)]) < 0.54


@pytest.mark.parametrize(("height", "width", "scale"), [(375, 500, (0.08, 1.0)), (60, 200, (0.5, 0.9))])
def test_random_crops_follow_torchvisions_law(height: int, width: int, scale: tuple[float, float]) -> None:
    torch.manual_seed(0)
    image = Image.new("L", (width, height))
    get_params = torchvision.transforms.RandomResizedCrop.get_params
    theirs = np.array([get_params(image, list(scale), list(RATIO)) for _ in range(DRAWS)], dtype=float)
    ours = np.array([random_resized_crop(key, height, width, *scale) for key in keys(DRAWS)], dtype=float)
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()

    def statistics(crops: np.ndarray) -> dict[str, np.ndarray]:
        top, left, h, w = crops.T
        # Positions as a part of the room that there is; where there is none, in the middle.
        down, right = (
            np.where(room > 0, p / np.maximum(room, 1), 0.5) for p, room in ((top, height - h), (left, width - w))
        )
        return {"area": h * w, "ratio": w / h, "down": down, "right": right}

    for name, values in statistics(ours).items():
        assert stats.ks_2samp(values, statistics(theirs)[name]).pvalue > 1e-4, name


@pytest.mark.parametrize(("height", "width"), [(12, 400), (400, 12), (1, 50)])
def test_where_no_crop_fits_the_centre_is_torchvisions(height: int, width: int) -> None:
    image = Image.new("L", (width, height))
    expected = torchvision.transforms.RandomResizedCrop.get_params(image, [0.5, 1.0], list(RATIO))
    for key in keys(20):
        assert random_resized_crop(key, height, width, 0.5, 1.0) == tuple(expected)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (33, 90)])
def test_the_central_crop_shows_what_resize_and_centre_crop_show(height: int, width: int) -> None:
    top, left, side, same = central_crop(height, width, 224 / 256)
    assert side == same == pytest.approx(224 / 256 * min(height, width), abs=0.5)
    # torchvision resizes the shorter side to 256 and cuts 224 from the middle.
    scale = 256 / min(height, width)
    assert top + side / 2 == pytest.approx(((height * scale - 224) / 2 + 112) / scale, abs=1)
    assert left + side / 2 == pytest.approx(((width * scale - 224) / 2 + 112) / scale, abs=1)
    assert central_crop(1, 1, 0.5) == (0, 0, 1, 1)


def test_compiled_crops_are_pythons() -> None:
    numba = pytest.importorskip("numba", reason="numba comes with FFCV")
    for crop in (training_crop(24, (0.08, 1.0), True, seed=2**31), validation_crop(28, 32)):
        function = crop.rectangle
        compiled = numba.njit(function)
        random = np.random.default_rng(0)
        for ticket in make_tickets(random.integers(0, 2**32, 500), epoch=90):
            height, width = (int(size) for size in random.integers(1, 600, 2))
            assert compiled(ticket, height, width) == function(ticket, height, width)


def test_crops_depend_on_seed_epoch_and_image_only() -> None:
    draw = training_crop(24, (0.08, 1.0), True, seed=1).rectangle
    tickets = [make_tickets([index], epoch)[0] for index in (0, 1) for epoch in (0, 1)]
    crops = [draw(ticket, 300, 400) for ticket in tickets]
    assert [draw(ticket, 300, 400) for ticket in reversed(tickets)] == crops[::-1]
    other_seed = training_crop(24, (0.08, 1.0), True, seed=2).rectangle(tickets[0], 300, 400)
    assert len({*crops, other_seed}) == 5
    unflipped = training_crop(24, (0.08, 1.0), False, seed=1).rectangle
    assert not any(unflipped(ticket, 300, 400)[4] for ticket in make_tickets(range(50), 0))


def test_fewer_images_than_a_global_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 x 8 images, but there are 15"):
        EpochOrder(15, 0, 2, 8, seed=0)
