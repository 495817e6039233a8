"""Both loaders: the same labels and nearly the same pixels, reproducible from any point, each image once."""

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from cnn.config import ImageFolder
from cnn.images.data import ImageFolderData
from cnn.images.tree import MEAN, STD
from cnn.prepare import main as prepare
from cnn.torchvision_shim import torchvision
from common.training.task import Batch
from tests.cnn.trees import HAS_FFCV, LOADERS, needs_ffcv, write_tree

CPU = torch.device("cpu")
TRAIN, VALIDATION = {"ant": 14, "bee": 12, "cat": 16}, {"ant": 7, "bee": 3, "cat": 9}  # 42 and 19 images


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both kinds of files; the .beton files hold the exact pixels."""
    folder = tmp_path_factory.mktemp("images")
    write_tree(folder / "train", TRAIN, seed=0)
    write_tree(folder / "val", VALIDATION, seed=1)
    if HAS_FFCV:
        assert prepare([f"source={folder}", "write_mode=raw", "resolution=100", "workers=1"]) == 0
    return folder


def config(folder: Path, loader: str, **changes: object) -> ImageFolder:
    keys = {"train_crop": 24, "scale": (0.08, 1.0), "flip": True, "resize": 36, "validation_crop": 32, "workers": 1}
    names = {"name": "image_folder", "train": "train", "validation": "val", "classes": None, "copy_to": None}
    return ImageFolder(loader=loader, folder=str(folder), **{**keys, **names, **changes})


@pytest.fixture(scope="module")
def opened(tree: Path) -> dict[str, ImageFolderData]:
    """Each loader, opened once: FFCV compiles for seconds."""
    return {loader: ImageFolderData(config(tree, loader), seed=3) for loader in [*["ffcv"] * HAS_FFCV, "torchvision"]}


def draw(batches: Iterable[Batch]) -> list[tuple[Tensor, Tensor]]:
    """Return copies of all batches: each is valid only until the next one is drawn."""
    return [(images.clone(), labels.clone()) for images, labels in batches]


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def levels(images: Tensor) -> Tensor:
    """Normalised images as pixels from 0 to 255."""
    return 255 * (images * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None])


@needs_ffcv
def test_both_loaders_give_the_same_labels_and_nearly_the_same_pixels(opened: dict[str, ImageFolderData]) -> None:
    for name, epoch in (("train", 0), ("train", 1), ("validation", 0)):
        ffcv, torchvision_ = (
            draw(data.train(0, 1, 7, CPU).epoch(epoch) if name == "train" else data.evaluation(0, 1, 7, CPU))
            for data in (opened["ffcv"], opened["torchvision"])
        )
        assert len(ffcv) == len(torchvision_) == (6 if name == "train" else 3)
        for (images, labels), (others, other_labels) in zip(ffcv, torchvision_, strict=True):
            assert torch.equal(labels, other_labels)
            assert images.dtype == others.dtype == torch.float32
            assert images.shape == others.shape
            assert images.stride() == others.stride()  # channels_last
            differences = (levels(images) - levels(others)).abs()
            # FFCV resamples by area, Pillow with a triangle.
            assert differences.mean() < 2
            assert differences.quantile(0.99) < 12
            assert (levels(images) - levels(others.roll(1, dims=0))).abs().mean() > 30  # other images do differ


@pytest.mark.parametrize("loader", LOADERS)
def test_validation_shows_what_torchvisions_transforms_show(
    opened: dict[str, ImageFolderData], loader: str, tree: Path
) -> None:
    transforms = torchvision.transforms
    transform = transforms.Compose(
        [transforms.Resize(36), transforms.CenterCrop(32), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )
    reference = torchvision.datasets.ImageFolder(str(tree / "val"), transform)
    batches = draw(opened[loader].evaluation(0, 1, 8, CPU))
    assert [len(labels) for _, labels in batches] == [8, 8, 3]
    images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    assert labels.tolist() == reference.targets
    expected = torch.stack([image for image, _ in reference])
    # They cut after resizing, at whole pixels of the result; ours is cut at whole pixels of the image.
    assert (levels(images) - levels(expected)).abs().mean() < 8
    assert (levels(images) - levels(expected.roll(1, dims=0))).abs().mean() > 30


def test_training_images_are_parts_of_the_right_images(tmp_path: Path) -> None:
    """Images of one colour each keep it, whatever is cut out."""
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    for split in ("train", "val"):
        for label, colour in enumerate(colours):
            (tmp_path / split / str(label)).mkdir(parents=True)
            for number in range(4):
                size = (30 + number, 50 - number)
                Image.new("RGB", size, colour).save(tmp_path / split / str(label) / f"{number}.png")
    data = ImageFolderData(config(tmp_path, "torchvision"), seed=0)
    batches = [*draw(data.train(0, 1, 4, CPU).epoch(0)), *draw(data.evaluation(0, 1, 4, CPU))]
    assert len(batches) == 6
    for images, labels in batches:
        expected = torch.tensor(colours, dtype=torch.float32)[labels]
        assert (levels(images) - expected[:, :, None, None]).abs().max() < 1e-3


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_is_the_same_from_any_point_on_and_in_any_process(
    opened: dict[str, ImageFolderData], loader: str
) -> None:
    data = opened[loader].train(1, 2, 5, CPU)
    assert data.steps_per_epoch == 4
    whole = draw(data.epoch(2))
    assert same(draw(opened[loader].train(1, 2, 5, CPU).epoch(2, start=1)), whole[1:])
    assert same(draw(data.epoch(2, start=3)), whole[3:])
    assert draw(data.epoch(2, start=4)) == []
    assert not torch.equal(draw(data.epoch(3))[0][0], whole[0][0])


@pytest.mark.parametrize("loader", LOADERS)
def test_an_image_looks_the_same_on_whichever_rank_it_is_drawn(opened: dict[str, ImageFolderData], loader: str) -> None:
    (alone,) = draw(opened[loader].train(0, 1, 40, CPU).epoch(1))
    shares = [draw(opened[loader].train(rank, 4, 10, CPU).epoch(1)) for rank in range(4)]
    together = [torch.cat(tensors) for tensors in zip(*(share[0] for share in shares), strict=True)]
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_the_seed_changes_order_and_crops(opened: dict[str, ImageFolderData], tree: Path) -> None:
    other = ImageFolderData(config(tree, "torchvision"), seed=4)
    ((images, labels),) = draw(opened["torchvision"].train(0, 1, 42, CPU).epoch(0))
    ((other_images, other_labels),) = draw(other.train(0, 1, 42, CPU).epoch(0))
    assert not torch.equal(labels, other_labels)
    assert not torch.equal(images.sum((1, 2, 3)).sort().values, other_images.sum((1, 2, 3)).sort().values)
    assert labels.bincount().tolist() == other_labels.bincount().tolist() == list(TRAIN.values())


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("shards", [3, 25])
def test_evaluation_shards_hold_every_image_once(opened: dict[str, ImageFolderData], loader: str, shards: int) -> None:
    (whole,) = draw(opened[loader].evaluation(0, 1, 19, CPU))
    batches = [draw(opened[loader].evaluation(shard, shards, 4, CPU)) for shard in range(shards)]
    assert all(len(labels) == 4 for shard in batches for _, labels in shard[:-1])
    for shard, drawn in enumerate(batches):
        images = [image for images, _ in drawn for image in images]
        assert len(images) == len(range(shard, 19, shards))
        assert all(torch.equal(a, b) for a, b in zip(images, whole[0][shard::shards], strict=True))


def test_train_data_opens_nothing_before_it_is_drawn_from(opened: dict[str, ImageFolderData], monkeypatch) -> None:
    data = opened["torchvision"]

    def read(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr("cnn.images.torchvision_loader.read_rgb", read)
    before = threading.active_count()
    train, batches = data.train(0, 1, 4, CPU), data.evaluation(0, 1, 4, CPU)
    epoch = train.epoch(0)
    assert threading.active_count() == before
    for drawn in (epoch, batches):
        with pytest.raises(AssertionError, match="opened"):
            next(drawn)


@needs_ffcv
def test_ffcvs_threads_end_with_their_epoch_and_leave_pytorchs_alone(opened: dict[str, ImageFolderData]) -> None:
    data = opened["ffcv"].train(0, 1, 2, CPU)
    draw(data.epoch(0))
    before, torchs_threads = set(threading.enumerate()), torch.get_num_threads()
    epoch = data.epoch(0)
    next(epoch)
    (thread,) = set(threading.enumerate()) - before
    epoch.close()  # left at its first batch
    thread.join(5)
    assert not thread.is_alive()
    assert torch.get_num_threads() == torchs_threads


@needs_ffcv
def test_what_goes_wrong_in_ffcvs_thread_reaches_the_reader(opened: dict[str, ImageFolderData], monkeypatch) -> None:
    from cnn.images.ffcv_loader import Epoch

    original = Epoch.run_pipeline

    def fail(self: Epoch, number: int, *arguments: object) -> object:
        if number == 2:
            raise MemoryError("no memory for batch 2")
        return original(self, number, *arguments)

    monkeypatch.setattr(Epoch, "run_pipeline", fail)
    batches = opened["ffcv"].train(0, 1, 7, CPU).epoch(0)
    assert [len(next(batches)[1]) for _ in range(2)] == [7, 7]
    with pytest.raises(MemoryError, match="no memory for batch 2"):
        next(batches)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / split, {"ant": 3, "bee": 3}, seed=0)
    broken = tmp_path / "train" / "bee" / "001.png"
    broken.write_bytes(broken.read_bytes()[:400])
    data = ImageFolderData(config(tmp_path, "torchvision"), seed=0)
    with pytest.raises(RuntimeError, match=r"bee/001.png: cannot be read as an image \(image file is truncated"):
        draw(data.train(0, 1, 2, CPU).epoch(0))
    draw(data.evaluation(0, 1, 2, CPU))


@needs_ffcv
def test_data_is_read_from_its_copy_on_the_hosts_own_disk(
    tree: Path, opened: dict[str, ImageFolderData], tmp_path: Path
) -> None:
    source, local = tmp_path / "source", tmp_path / "local"
    source.mkdir()
    for file in tree.glob("*.beton*"):
        shutil.copy(file, source)
    data = ImageFolderData(config(source, "ffcv", copy_to=str(local)), seed=3)
    shutil.rmtree(source)
    original, copied = (draw(either.evaluation(0, 1, 19, CPU)) for either in (opened["ffcv"], data))
    assert same(original, copied)
