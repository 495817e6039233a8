"""LibreOffice's help out of small packages: what corresponds, what is kept, and to which split it belongs."""

import json
from pathlib import Path

import pytest

from tests.registry import Registry, write_deb
from transformer import prepare
from transformer.preparation.packaged import split_of_page

WORDS = {"en-US": ["open", "the", "menu"], "de": ["öffnen", "Sie", "das"]}


def page(language: str, number: int) -> bytes:
    """Return a page with a pair that no other page has, one that all have, and some that are not kept."""
    word = " ".join(WORDS[language])
    blocks = {f"par_{number}": f"{word} <b>number</b> {number}", "par_all": f"{word} of {word}", "hd_1": word}
    blocks |= {"par_code": "the same on both sides", f"par_{language}": f"{word} in one language only"}
    blocks |= {"par_long": f"{word} " * 21, "par_twice": f"{word} that counts"}
    text = "".join(f"<p id={name}>{content}</p>" for name, content in blocks.items())
    return f"<meta charset=utf-8><body>{text}<p id=par_twice>{word} that does not count</p></body>".encode()


@pytest.fixture(autouse=True)
def packages(registry: Registry) -> None:
    for language in WORDS:
        under = f"usr/share/libreoffice/help/{language}/text"
        pages = {f"{under}/shared/{number}.html": page(language, number) for number in range(40)}
        write_deb(registry.shelf, f"libreoffice-help-{language.lower()}", pages)


def test_pairs_are_aligned_by_id_and_split_by_page(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = [f"archives={tmp_path}/archives", f"output={output}", "merges=20", "jobs=1"]
    assert prepare.main(["source=libreoffice_help", "pair=en-de", *arguments]) == 0
    pages = {f"shared/{number}.html": number for number in range(40)}
    for split in ("valid", "test"):
        sides = [(output / "raw" / f"{split}.{language}").read_text().splitlines() for language in ("en", "de")]
        own = [number for name, number in sorted(pages.items()) if split_of_page(name) == split]
        assert own
        common = ["of", "that"] if split_of_page("shared/0.html") == split else []
        lines = [line for line in zip(*sides, strict=True) if line[0].split()[3] not in common]
        assert lines == [(f"open the menu number {n}", f"öffnen Sie das number {n}") for n in own]
    made = json.loads((output / "prepared.json").read_text())
    assert sum(made["pairs"].values()) == 42
    assert [package["name"] for package in made["recipe"]["packages"]] == [
        "libreoffice-help-en-us", "libreoffice-help-de",
    ]  # fmt: skip
    assert "libreoffice-help-de 1.0-1, MPL-2.0, sha256 " in capsys.readouterr().out
    assert prepare.main(["corpus=libreoffice_help_en_de", *arguments]) == 0
    assert len(registry.calls) == 2


def test_a_pair_that_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["source=libreoffice_help"]) == 2
    assert capsys.readouterr().err == "error: source=libreoffice_help: expected pair=en-de or pair=en-fr, too\n"
