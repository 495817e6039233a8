"""English prose out of small packages: unique paragraphs, a split by the names of pages, what the header says."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from gpt2.prepare import main
from gpt2.token_files import DTYPE, read_header
from tests.registry import Registry, write_deb


def text_of(package: str, number: int) -> str:
    return f"A paragraph of {package} that is on page {number} only."


def texts(folder: Path, split: str) -> list[str]:
    tokens = np.fromfile(folder / f"{split}.bin", DTYPE)
    return ["".join(map(chr, piece[piece < 256])) for piece in np.split(tokens, np.flatnonzero(tokens == 256) + 1)][:-1]


def digests(folder: Path) -> list[str]:
    return [hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest()[:16] for split in ("train", "val")]


@pytest.fixture(autouse=True)
def packages(registry: Registry) -> None:
    folders = {
        "anarchism": "usr/share/doc/anarchism/html",
        "linux-doc-6.12": "usr/share/doc/linux-doc-6.12/html",
        "libreoffice-help-en-us": "usr/share/libreoffice/help/en-US/text",
    }
    for package, folder in folders.items():
        every = "<p>This one is on every page of all of these packages.</p><p>Too short.</p>"
        pages = {f"{folder}/{n}.html": f"<p>{text_of(package, n)}</p>{every}".encode() for n in range(20)}
        pages[f"{folder}/translations/it.html"] = b"<p>Un paragrafo che non va letto, in un'altra lingua.</p>"
        write_deb(registry.shelf, package, pages)


def test_paragraphs_are_unique_and_pages_are_split_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prepared(name: str) -> dict[str, list[str]]:
        command = ["source=debian_prose", f"archives={tmp_path}/archives", f"output={tmp_path / name}"]
        assert main([*command, "tokenizer=bytes", "validation_fraction=0.2", "processes=1"]) == 0
        return {split: texts(tmp_path / name, split) for split in ("train", "val")}

    first = prepared("first")
    assert digests(tmp_path / "first") == ["e2c1340b6fb33cc7", "e0bdbd2396c3cef6"]  # the same bytes as ever
    pages = {text_of(package, n) for package in ("anarchism", "linux-doc-6.12", "libreoffice-help-en-us")
             for n in range(20)}  # fmt: skip
    everything = [line for part in first.values() for page in part for line in page.splitlines()]
    assert sorted(everything) == sorted(pages | {"This one is on every page of all of these packages."})
    assert 5 < len(first["val"]) < 20
    packages = read_header(tmp_path / "first").inputs["packages"]
    assert [package["name"] for package in packages] == ["anarchism", "linux-doc-6.12", "libreoffice-help-en-us"]
    assert f"linux-doc-6.12 1.0-1 {packages[1]['sha256']} GPL-2" in capsys.readouterr().out
    # Another version, with a page more: all other pages stay where they were.
    new = "A paragraph that only the newer version of this package has."
    old = {f"usr/share/doc/anarchism/html/{n}.html": f"<p>{text_of('anarchism', n)}</p>".encode() for n in range(20)}
    (tmp_path / "archives" / "anarchism_1.0-1_all.deb").unlink()
    more = {"usr/share/doc/anarchism/html/00.html": f"<p>{new}</p>".encode()}
    write_deb(tmp_path / "archives", "anarchism", old | more, "2.0-1")
    second = prepared("second")
    for split in ("train", "val"):
        before, after = ({page.splitlines()[0] for page in each[split]} for each in (first, second))
        assert after - {new} == before
    command = ["source=debian_prose", f"archives={tmp_path}/archives", f"output={tmp_path / 'third'}"]
    assert main([*command, "validation_fraction=1e-9", "tokenizer=bytes"]) == 2
    assert (
        "the source has 61 documents: expected at least 2, one of them for validation, but" in capsys.readouterr().err
    )
