"""CIFAR-10: its files, the crops, training on a small copy in the published format."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from cnn.cifar10 import MEAN, STD, Cifar10Data, augment, load_cifar10, normalise
from cnn.config import Cifar10
from cnn.torchvision_shim import torchvision
from common.config.config import ConfigError
from common.launch.processes import launch

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
PER_FILE = 12
CPU = torch.device("cpu")


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a folder with a small CIFAR-10 whose checksums torchvision accepts, and each file's rows of pixels."""
    folder, random = tmp_path / "data" / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = {name: random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8) for name in [*TRAIN, "test_batch"]}
    contents = {name: {"data": data, "labels": [n % 10 for n in range(PER_FILE)]} for name, data in rows.items()}
    contents["batches.meta"] = {"label_names": [f"class {n}" for n in range(10)]}
    sums = {}
    for name, content in contents.items():
        written = pickle.dumps(content)
        (folder / name).write_bytes(written)
        sums[name] = hashlib.md5(written).hexdigest()
    known = torchvision.datasets.CIFAR10
    monkeypatch.setattr(known, "train_list", [[name, sums[name]] for name in TRAIN])
    monkeypatch.setattr(known, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(known, "meta", known.meta | {"md5": sums["batches.meta"]})
    return tmp_path / "data", rows


def opened(folder: Path, shift: int = 0, flip: bool = False) -> Cifar10Data:
    return Cifar10Data(Cifar10(name="cifar10", folder=str(folder), shift=shift, flip=flip), seed=3)


def test_images_are_read_as_stored(cifar10) -> None:
    """A row holds 1,024 red levels, then green, then blue, each row by row of the image."""
    folder, rows = cifar10
    (train, labels), (validation, _) = load_cifar10(str(folder))
    stored = np.concatenate([rows[name] for name in TRAIN])
    assert (train.dtype, train.shape, labels.dtype) == (torch.uint8, (5 * PER_FILE, 3, 32, 32), torch.int64)
    assert train[7, 2, 5, 9] == stored[7, 2 * 1024 + 5 * 32 + 9]
    assert np.array_equal(train.flatten(1).numpy(), stored)
    assert np.array_equal(validation.flatten(1).numpy(), rows["test_batch"])
    assert labels.tolist() == [n % 10 for n in range(PER_FILE)] * 5


def test_missing_and_damaged_files_are_refused_with_the_way_to_get_them(cifar10, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"data.folder={tmp_path}/none: .*missing.*curl -L https.* -C {tmp_path}/none"
    ):
        opened(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    folder, _ = cifar10
    (folder / "cifar-10-batches-py" / "data_batch_4").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match=f"data.folder={folder}: .*not complete"):
        opened(folder)


def test_pixels_are_normalised_by_the_known_mean_and_deviation() -> None:
    """The values in [0, 1] of the authors' script."""
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    expected = torchvision.transforms.functional.normalize(images / 255, mean, std)
    assert torch.allclose(normalise(images), expected, atol=1e-5)


def test_training_images_are_crops_with_a_black_border_half_of_them_mirrored() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (200, 3, 6, 6), dtype=torch.uint8)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    mean, std = (torch.tensor(level)[:, None, None] for level in (MEAN, STD))
    levels = (augment(images, shift=4, flip=True) * std + mean).round().byte().numpy()
    found = []
    for before, after in zip(padded, levels, strict=True):
        crops = {
            (top, left, mirrored): before[:, top : top + 6, left : left + 6][..., :: -1 if mirrored else 1]
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
        }
        alike = [key for key, crop in crops.items() if np.array_equal(crop, after)]
        assert len(alike) == 1
        found += alike
    tops, lefts, mirrored = zip(*found, strict=True)
    assert set(tops) == set(lefts) == set(range(9))
    assert 70 < sum(mirrored) < 130  # 4.2 standard deviations
    assert torch.equal(augment(images, shift=0, flip=False), normalise(images))


def test_workers_share_one_copy_and_each_image_is_evaluated_once(cifar10) -> None:
    folder, rows = cifar10
    data = opened(folder)
    shares = [data.train(rank, 3, 5, CPU) for rank in range(3)]
    assert len({share._images.data_ptr() for share in shares}) == 1
    epoch = [batch for share in shares for batch in share.epoch(0)]
    assert {(images.shape, images.dtype) for images, _ in epoch} == {((5, 3, 32, 32), torch.float32)}
    seen = torch.cat([images for images, _ in epoch]).flatten(1)
    assert len(seen) == len(seen.unique(dim=0)) == data.train_size == 5 * PER_FILE
    shards = [list(data.evaluation(shard, 5, 2, CPU)) for shard in range(5)]
    evaluated = torch.cat([images for shard in shards for images, _ in shard]).flatten(1)
    wanted = normalise(torch.as_tensor(rows["test_batch"]).view(-1, 3, 32, 32)).flatten(1)
    assert sorted(evaluated.tolist()) == sorted(wanted.tolist())


def test_the_recipe_trains_on_it(cifar10, tmp_path: Path) -> None:
    folder, _ = cifar10
    overrides = ["experiment=exponential/cifar10", f"data.folder={folder}", "workers=simulated", "model.depth=8"]
    overrides += ["training.batch_size=16", "training.epochs=3", "training.threads=1", "logging.every=1"]
    assert launch("cnn", [*overrides, "logging.progress=false", f"run_dir={tmp_path}/run"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["split"] == "train"]) == 3 * (5 * PER_FILE // 16)
    last = rows[-1]
    assert last["split"] == "validation"
    assert {"accuracy", "accuracy_top5", "local_accuracy"} <= last.keys()
