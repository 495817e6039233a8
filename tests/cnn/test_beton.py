"""Copies on the host's own disk: once, complete or not at all."""

import os
import shutil
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cnn.images.beton import stage
from common.config.config import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "data").mkdir()
    files = [tmp_path / "data" / name for name in ("train.beton", "val.beton")]
    for number, file in enumerate(files):
        file.write_bytes(os.urandom(1000 + number))
        os.utime(file, (1e9, 1e9))
    return files


def copied(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split()[1].split("/")[-1] for line in capfd.readouterr().err.splitlines() if "copying" in line]


def test_copies_once_and_again_only_what_has_changed(files: list[Path], tmp_path: Path, capfd) -> None:
    copies = stage(files, tmp_path / "local")
    assert copied(capfd) == ["train.beton", "val.beton"]
    assert [copy.read_bytes() for copy in copies] == [file.read_bytes() for file in files]
    assert all(copy.is_relative_to(tmp_path / "local") for copy in copies)
    assert stage(files, tmp_path / "local") == copies
    assert copied(capfd) == []
    files[1].write_bytes(b"new")
    assert stage(files, tmp_path / "local") == copies
    assert copied(capfd) == ["val.beton"]
    assert copies[1].read_bytes() == b"new"
    copies[0].write_bytes(b"cut off")
    stage(files, tmp_path / "local")
    assert copied(capfd) == ["train.beton"]
    assert copies[0].read_bytes() == files[0].read_bytes()


def test_many_processes_make_one_copy_and_none_sees_half_of_it(files: list[Path], tmp_path: Path, monkeypatch) -> None:
    copies = []

    def slow(source: Path, target: Path) -> None:
        copies.append(target)
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[:500])
        time.sleep(0.05)
        Path(target).write_bytes(content)
        shutil.copystat(source, target)

    monkeypatch.setattr(shutil, "copy2", slow)

    def one_process(_: int) -> list[bytes]:
        return [copy.read_bytes() for copy in stage(files, tmp_path / "local")]

    # A lock belongs to an open file: threads exclude each other as processes do.
    with ThreadPoolExecutor(6) as pool:
        seen = list(pool.map(one_process, range(6)))
    assert seen == [[file.read_bytes() for file in files]] * 6
    assert len(copies) == 2


def test_a_copy_that_fails_leaves_nothing_behind(files: list[Path], tmp_path: Path, monkeypatch) -> None:
    def fail(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(ConfigError, match=r"data.copy_to=.*local: cannot copy .*No space left on device"):
        stage(files, tmp_path / "local")
    left = [file.name for file in (tmp_path / "local").rglob("*") if file.is_file()]
    assert left == [".lock"]
    monkeypatch.undo()
    assert [copy.read_bytes() for copy in stage(files, tmp_path / "local")] == [file.read_bytes() for file in files]


def test_what_killed_copies_left_is_removed(files: list[Path], tmp_path: Path) -> None:
    (copy,) = stage(files[:1], tmp_path / "local")
    dead = copy.with_name(".x.beton.part")
    dead.write_bytes(b"half of it")
    stage(files, tmp_path / "local")
    assert not dead.exists()


def test_free_space_is_checked_first(files: list[Path], tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    copies = stage(files[:1], tmp_path / "local")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5e9, 5e9, 1000))
    with pytest.raises(ConfigError, match=r"data.copy_to=.*: 1e-06 GB needed, but 1e-06 GB are free"):
        stage(files, tmp_path / "local")  # 1001 bytes are missing
    assert stage(files[:1], tmp_path / "local") == copies


def test_data_sets_with_files_of_the_same_name_do_not_meet(files: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "data" / "train.beton"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"other")
    first, second = stage(files[:1], tmp_path / "local"), stage([other], tmp_path / "local")
    assert first[0].read_bytes() == files[0].read_bytes()
    assert second[0].read_bytes() == b"other"
