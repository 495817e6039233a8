"""Training on image files through the command line: digits written by cnn.prepare; what is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from cnn.prepare import main as prepare
from common.launch.processes import launch
from tests.cnn.trees import HAS_FFCV, LOADERS, needs_ffcv, write_tree

SHORT = ["data=digits_images", "data.workers=1", "workers=simulated", "workers.count=2", "training.batch_size=64"]
SHORT += ["training.threads=1", "model.width=8", "logging.progress=false", "logging.every=1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 80 training images of ten classes."""
    folder = tmp_path_factory.mktemp("images")
    for seed, split in enumerate(("train", "val")):
        write_tree(folder / split, {str(number): 8 for number in range(10)}, seed)
    if HAS_FFCV:
        assert prepare([f"source={folder}", "resolution=100", "workers=1"]) == 0
    return folder


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line message with which a configuration is refused."""
    capsys.readouterr()
    assert launch("cnn", [*SHORT, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_both_loaders_train_on_the_digits(loader: str, tmp_path: Path) -> None:
    only = ["--images-only"] if loader == "torchvision" else []
    assert prepare(["source=digits", f"output={tmp_path}/digits", *only]) == 0
    arguments = [f"data.folder={tmp_path}/digits", f"data.loader={loader}", "optimizer=adam", "optimizer.lr=0.01"]
    arguments += ["training.steps=30", "evaluation.every=30", f"run_dir={tmp_path}/run"]
    assert launch("cnn", [*SHORT, *arguments]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@needs_ffcv
def test_files_that_are_missing_or_do_not_fit_are_refused(images: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "data"
    error = refused(f"data.folder={folder}", capsys=capsys)
    assert f"{folder}/train.beton is missing" in error
    assert f"`python -m cnn.prepare source=IMAGES output={folder}` makes it" in error

    folder.mkdir()
    for name in ("train.beton", "train.beton.json", "val.beton", "val.beton.json"):
        shutil.copyfile(images / name, folder / name)
    error = refused(f"data.folder={folder}", "data.classes=1000", capsys=capsys)
    assert f"data.classes=1000: data.folder={folder} has 10 classes" in error
    assert "expected at most the 80 training images" in refused(
        f"data.folder={folder}", "training.batch_size=96", capsys=capsys
    )
    with (folder / "val.beton").open("r+b") as file:
        file.truncate(5000)
    assert "val.beton: has 5000 bytes, expected " in refused(f"data.folder={folder}", capsys=capsys)
    content = (images / "val.beton").read_bytes()
    (folder / "val.beton").write_bytes(bytes(24) + content[24:])
    assert "val.beton: is damaged, expected a file of FFCV with" in refused(f"data.folder={folder}", capsys=capsys)
    (folder / "val.beton.json").write_text("{}")
    assert "val.beton.json: not an index of this version" in refused(f"data.folder={folder}", capsys=capsys)
    index = json.loads((images / "val.beton.json").read_text())
    (folder / "val.beton.json").write_text(json.dumps(index | {"classes": [*index["classes"][:9], "ten"]}))
    shutil.copyfile(images / "val.beton", folder / "val.beton")
    assert "9 only in the training images; ten only in the validation" in refused(
        f"data.folder={folder}", capsys=capsys
    )


@needs_ffcv
def test_without_ffcv_the_way_out_is_told(images: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ffcv", None)  # import fails
    error = refused(f"data.folder={images}", capsys=capsys)
    assert "data.loader=ffcv: FFCV cannot be imported" in error
    assert "`make env` installs it" in error
    assert "data.loader=torchvision" in error


def test_folders_that_are_missing_or_empty_are_refused(images: Path, tmp_path: Path, capsys) -> None:
    torchvision = ["data.loader=torchvision", f"data.folder={tmp_path}"]
    assert f"data.folder={tmp_path}: {tmp_path}/train: no such folder" in refused(*torchvision, capsys=capsys)
    shutil.copytree(images / "train", tmp_path / "train")
    (tmp_path / "val").mkdir()
    assert "val: expected a folder of images for each class" in refused(*torchvision, capsys=capsys)
    shutil.copytree(images / "val", tmp_path / "val", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "val" / "7")
    assert "same classes in both, but 7 only in the training images" in refused(*torchvision, capsys=capsys)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.validation_crop=33", "data.validation_crop=33: expected at most data.resize=32"),
        ("data.scale=[0.9,0.1]", "data.scale=[0.9, 0.1]: expected the smaller number first"),
        ("data.scale=[0.1,1.5]", "data.scale.1=1.5: "),
        ("data.copy_to=/local", "data.copy_to='/local': only .beton files are copied"),
        ("data.train_crop=0", "data.train_crop=0: "),
    ],
)
def test_keys_that_do_not_fit_are_refused(argument: str, message: str, capsys) -> None:
    assert message in refused("data.loader=torchvision", argument, capsys=capsys)
