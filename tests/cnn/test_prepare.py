"""cnn.prepare: .beton files of folders of images, and what is wrong with folders."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnn.digits import MEAN, STD, load_digits
from cnn.images.tree import read_rgb, read_tree
from cnn.prepare import main
from common.training.signals import SIGNALS
from tests.cnn.trees import needs_ffcv, smooth_image, write_tree

kept: list[object] = []  # numba stumbles when the garbage collector takes FFCV's own decoders away

CLASSES = {"ant": 3, "bee": 2, "cat": 4}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with train/ and val/."""
    for seed, name in enumerate(("train", "val")):
        write_tree(tmp_path / "source" / name, CLASSES, seed)
    return tmp_path / "source"


def run(*arguments: str, code: int = 0) -> None:
    assert main([*arguments, "workers=1", "resolution=100"]) == code


def stored(folder: Path, name: str) -> list[tuple[np.ndarray, int]]:
    """Return the images and labels of a .beton file, read with FFCV's loader; the images must have one size."""
    from cnn.images.beton import torch_threads_kept

    with torch_threads_kept():
        from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader

        pipelines = {"image": [SimpleRGBImageDecoder()], "label": [IntDecoder()]}
        loader = Loader(str(folder / name), 1, num_workers=1, pipelines=pipelines)
        kept.append(loader)
        return [(image[0].copy(), int(label[0, 0])) for image, label in loader]


@needs_ffcv
def test_files_and_index(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "data"
    run(f"source={source}", f"output={output}", "write_mode=raw")
    assert sorted(file.name for file in output.iterdir()) == [
        ".lock", "train.beton", "train.beton.json", "val.beton", "val.beton.json",
    ]  # fmt: skip
    index = json.loads((output / "train.beton.json").read_text())
    assert (index["classes"], index["counts"]) == (["ant", "bee", "cat"], [3, 2, 4])
    assert index["bytes"] == (output / "train.beton").stat().st_size
    assert (index["resolution"], index["write_mode"], index["quality"]) == (100, "raw", 90)
    assert (index["skipped"], index["converted"]) == ([], {})
    assert "train.beton: 9 images of 3 classes" in capsys.readouterr().out


@needs_ffcv
def test_images_keep_their_order_labels_and_pixels_and_become_rgb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    modes = {"ant": "RGB", "bee": "L", "cat": "CMYK", "dog": "P", "eel": "RGBA"}
    images = {name: smooth_image(random, 24, 30) for name in modes}
    for split in ("train", "val"):
        for name, mode in modes.items():
            (tmp_path / split / name).mkdir(parents=True)
            images[name].convert(mode).save(tmp_path / split / name / ("image.tif" if mode == "CMYK" else "image.png"))
    run(f"source={tmp_path}", "write_mode=raw")
    written = stored(tmp_path, "train.beton")
    assert [label for _, label in written] == [0, 1, 2, 3, 4]
    for (pixels, _), (name, mode) in zip(written, modes.items(), strict=True):
        assert np.array_equal(pixels, np.asarray(images[name].convert(mode).convert("RGB"))), mode
    assert json.loads((tmp_path / "train.beton.json").read_text())["converted"] == {
        "CMYK": 1,
        "L": 1,
        "P": 1,
        "RGBA": 1,
    }
    assert "converted to RGB: 1 CMYK, 1 L, 1 P, 1 RGBA" in capsys.readouterr().out


@needs_ffcv
def test_large_images_are_reduced_and_jpegs_resemble_them(tmp_path: Path) -> None:
    image = smooth_image(np.random.default_rng(0), 60, 80)
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        image.save(tmp_path / split / "ant" / "image.png")
    assert main([f"source={tmp_path}", "resolution=40", "workers=1", "quality=95"]) == 0
    ((pixels, _),) = stored(tmp_path, "train.beton")
    expected = np.asarray(image.resize((40, 30), Image.Resampling.BOX)).astype(int)
    assert pixels.shape == (30, 40, 3)
    assert np.abs(pixels - expected).mean() < 6  # JPEG halves the resolution of colours


@needs_ffcv
def test_corrupt_images_are_an_error_or_skipped(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut, text = source / "train" / "ant" / "001.png", source / "train" / "cat" / "003.png"
    cut.write_bytes(cut.read_bytes()[:300])
    text.write_text("no image")
    run(f"source={source}", code=2)
    error = capsys.readouterr().err
    assert "2 of 9 files cannot be decoded" in error
    assert f"{cut}: image file is truncated" in error
    assert f"{text}: cannot identify image file" in error
    assert "corrupt=skip" in error
    assert [file.name for file in sorted(source.glob("*beton*"))] == ["val.beton", "val.beton.json"]  # these were whole
    run(f"source={source}", "corrupt=skip", "quality=10", code=2)
    assert f"{source}/val.beton: there already" in capsys.readouterr().err

    run(f"source={source}", "corrupt=skip")
    index = json.loads((source / "train.beton.json").read_text())
    assert index["skipped"] == [str(cut), str(text)]
    assert index["counts"] == [2, 2, 3]
    assert f"{source}/val.beton: there already, made from the same images\n" in capsys.readouterr().out
    (source / "train.beton").unlink()
    image = next((source / "val" / "ant").iterdir())
    image.rename(source / "val" / "cat" / "moved.png")  # as many images, with other labels
    run(f"source={source}", "corrupt=skip", code=2)
    assert f"{source}/val.beton: there already; --overwrite makes it anew" in capsys.readouterr().err


@needs_ffcv
def test_an_image_that_breaks_later_is_no_black_pixel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass that leaves out what the first one found, as on a network disk; with any default kind of process."""
    from cnn.images import writer

    first, later = source / "train" / "ant" / "001.png", source / "train" / "bee" / "000.png"
    first.write_text("no image")
    opened = source / "opened"

    def read(file: str) -> tuple[Image.Image, str]:
        if Path(file) == later and opened.exists():
            raise OSError("Input/output error")
        opened.touch()
        return read_rgb(file)

    monkeypatch.setattr(writer, "read_rgb", read)
    monkeypatch.setattr(writer.multiprocessing, "Process", None)
    run(f"source={source}", "corrupt=skip", "--overwrite")
    assert json.loads((source / "train.beton.json").read_text())["skipped"] == [str(first), str(later)]


@needs_ffcv
def test_a_page_is_written_at_once() -> None:
    from cnn.images.writer import Encoding

    assert Encoding(8192, 90, "raw", 0.5).page_size() < 2**31 - 4096  # the most that Linux writes


@needs_ffcv
@pytest.mark.parametrize(
    ("size", "arguments", "pixels"),
    [
        ((3, 900), ["resolution=100"], "3 x 900"),
        ((1000, 800), ["resolution=null", "write_mode=raw"], "1000 x 800"),
        ((70_000, 1), ["resolution=null"], "70000 x 1"),
    ],
)
def test_images_that_cannot_be_stored_are_named_as_corrupt_ones(
    size: tuple[int, int], arguments: list[str], pixels: str, source: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("cnn.images.writer.LARGEST_IMAGE", 2**21)
    file = source / "train" / "ant" / "001.png"
    Image.new("RGB", size).save(file)
    assert main([f"source={source}", "workers=1", *arguments]) == 2
    error = capsys.readouterr().err
    assert "1 of 9 files cannot be decoded or stored" in error
    assert f"{file}: {pixels} pixels cannot be stored (" in error
    (source / ".train.beton.1.part").write_text("of a process that was killed")
    assert main([f"source={source}", "workers=1", "corrupt=skip", *arguments]) == 0
    assert json.loads((source / "train.beton.json").read_text())["skipped"] == [str(file)]
    assert not (source / ".train.beton.1.part").exists()


@needs_ffcv
def test_a_second_preparation_waits_and_is_then_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as pool:  # a lock belongs to an open file: threads exclude each other as processes do
        codes = list(pool.map(lambda _: main([f"source={source}", "workers=1"]), range(2)))
    assert sorted(codes) == [0, 2]
    assert "there already" in capsys.readouterr().err


@needs_ffcv
def test_a_class_of_corrupt_images_only_is_an_error(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (source / "train" / "bee").iterdir():
        file.write_text("no image")
    run(f"source={source}", "corrupt=skip", code=2)
    assert "no image is left of bee" in capsys.readouterr().err


@needs_ffcv
def test_what_is_there_is_only_replaced_on_request(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"source={source}")
    before = (source / "train.beton").read_bytes()
    run(f"source={source}", "quality=10", code=2)
    assert "train.beton, " in capsys.readouterr().err
    assert (source / "train.beton").read_bytes() == before
    run(f"source={source}", "quality=10", "--overwrite")
    assert json.loads((source / "train.beton.json").read_text())["quality"] == 10


@needs_ffcv
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (
            lambda: (_ for _ in ()).throw(OSError(28, "No space left")),
            2,
            "val.beton: cannot be written (OSError: [Errno 28] No space left",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 1, "error: workers: one of the processes was killed, probably"),
    ],
)
def test_a_writing_process_that_dies_ends_it(
    source: Path, failure, code: int, message: str, monkeypatch, capsys
) -> None:
    from cnn.images import writer

    monkeypatch.setattr(writer, "worker_job_indexed_dataset", lambda *arguments: failure())
    run(f"source={source}", code=code)
    assert message in capsys.readouterr().err
    assert sorted(file.name for file in source.iterdir()) == [".lock", "train", "val"]


@needs_ffcv
def test_writing_processes_do_not_hear_what_slurm_sends_to_all(source: Path, monkeypatch) -> None:
    from cnn.images import writer

    original = writer.worker_job_indexed_dataset

    def signalled(*arguments: object) -> None:
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        original(*arguments)

    monkeypatch.setattr(writer, "worker_job_indexed_dataset", signalled)
    run(f"source={source}")
    assert (source / "train.beton.json").exists()


LEVELS = np.linspace(0, 65535, 24 * 30).reshape(24, 30)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_become_eight(name: str, tmp_path: Path) -> None:
    Image.fromarray(LEVELS.astype(np.uint16)).save(tmp_path / name)
    image, mode = read_rgb(tmp_path / name)
    assert mode.startswith("I")
    expected = np.repeat(LEVELS.astype(np.uint16)[..., None] >> 8, 3, axis=2)
    assert np.array_equal(np.asarray(image), expected)


def only_transparent() -> Image.Image:
    image = Image.new("RGBA", (30, 24))
    image.putalpha(Image.fromarray((LEVELS / 257).astype(np.uint8)))
    return image


@pytest.mark.parametrize(
    ("name", "image", "message"),
    [
        ("a.tif", Image.fromarray(LEVELS.astype(np.int32)), "mode I does not say which levels are black and white"),
        ("a.tif", Image.fromarray((LEVELS / 65535).astype(np.float32)), "mode F does not say which levels"),
        ("a.png", Image.fromarray((LEVELS / 257).astype(np.uint16)), "mode I;16: as RGB it would have one colour only"),
        ("a.png", only_transparent(), "mode RGBA: as RGB it would have one colour only"),
    ],
)
def test_conversions_that_would_lose_the_content_are_refused(name: str, image, message: str, tmp_path: Path) -> None:
    image.save(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        read_rgb(tmp_path / name)


def test_what_is_no_image_of_a_known_kind_is_left_out_aloud(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = read_tree(source / "train")
    for name in (".ipynb_checkpoints/000.png", "ant/.ipynb_checkpoints/000.png", "ant/._000.png", "ant/a.gif"):
        (source / "train" / name).parent.mkdir(exist_ok=True)
        (source / "train" / name).write_bytes(Path(whole.files[0]).read_bytes())
    assert read_tree(source / "train") == whole
    expected = f"4 skipped (hidden or of another type), such as {source}/train/.ipynb_checkpoints"
    assert expected in caplog.text


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    """Opening one would wait for its writer."""
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(ValueError, match="not a file but a pipe"):
        read_rgb(tmp_path / "x.png")


def empty_class(source: Path) -> None:
    (source / "train" / "dog").mkdir()
    (source / "val" / "dog").mkdir()


def flat(source: Path) -> None:
    for split in ("train", "val"):
        for number, file in enumerate(sorted((source / split).glob("*/*"))):
            file.rename(source / split / f"{number}.png")
        for folder in (source / split).iterdir():
            if folder.is_dir():
                folder.rmdir()


def other_classes(source: Path) -> None:
    (source / "val" / "bee").rename(source / "val" / "fox")


def not_utf_8(source: Path) -> None:
    os.rename(os.fsencode(source / "train" / "ant"), os.fsencode(source / "train") + b"/caf\xe9")


def loop(source: Path) -> None:
    (source / "train" / "ant" / "loop").symlink_to("..")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (loop, "train/ant/loop/ant: a link leads back to a folder above it"),
        (not_utf_8, "train: expected folders named in UTF-8, found caf\ufffd"),
        (lambda source: (source / "val").rename(source / "test"), "val: no such folder; expected one that holds"),
        (empty_class, "train: Found no valid file for the classes dog"),
        (flat, "train: expected a folder of images for each class, found no folders in it"),
        (other_classes, "the same classes in both, but bee only in the training images; fox only in the validation"),
    ],
)
def test_wrong_folders_are_one_line_and_exit_code_2(source: Path, spoil, message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("cnn.prepare.import_ffcv", lambda: None)
    spoil(source)
    run(f"source={source}", code=2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: source={source}: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["source=digits", f"output={tmp_path}/file", "--images-only"]) == 2
    assert f"output={tmp_path}/file: cannot be written" in capsys.readouterr().err


def test_wrong_arguments_are_one_line_and_exit_code_2(tmp_path: Path, capsys, monkeypatch) -> None:
    def missing() -> None:
        raise ImportError("FFCV cannot be imported (why). `make env` installs it")

    monkeypatch.setattr("cnn.prepare.import_ffcv", missing)
    cases = {
        ("source=digits",): "output=...: missing",
        (f"source={tmp_path}", "--images-only"): "expected source=digits",
        (f"source={tmp_path}", "quality=101"): "quality=101: ",
        (f"source={tmp_path}", "write_mode=png"): "write_mode='png': ",
        (f"source={tmp_path}",): "`make env` installs it",
        ("source=digits", f"output={tmp_path}"): "(made with --images-only)",
    }
    for arguments, message in cases.items():
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_digits_become_images_of_the_same_split(tmp_path: Path) -> None:
    assert main(["source=digits", f"output={tmp_path}", "--images-only"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "train", "val"]
    for folder, (images, labels) in zip(("train", "val"), load_digits(0.2), strict=True):
        assert len(list((tmp_path / folder).glob("*/*.png"))) == len(labels)
        for number in range(0, len(labels), 97):
            image = Image.open(tmp_path / folder / str(labels[number].item()) / f"{number:04d}.png")
            assert (image.mode, image.size) == ("RGB", (32, 32))
            pixels = torch.tensor(np.asarray(image.resize((8, 8), Image.Resampling.BOX))[..., 0] / 255)
            original = (images[number, 0] * STD + MEAN) / 16
            assert torch.corrcoef(torch.stack([pixels.flatten(), original.flatten()]))[0, 1] > 0.97
    assert main(["source=digits", f"output={tmp_path}", "--images-only"]) == 2
    assert main(["source=digits", f"output={tmp_path}", "--images-only", "--overwrite"]) == 0
