"""The user's own parallel text: what is compared, cleaned, locked and refused by name."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config.config import ConfigError
from common.launch.compose import compose_config
from tests.waiting import wait_for
from transformer import prepare
from transformer.corpus import Corpus, check_preparation
from transformer.preparation import pipeline
from transformer.text import Subwords

LINES = {"train": 60, "valid": 6, "test": 6}


def write_texts(texts: Path, train: int = LINES["train"]) -> None:
    texts.mkdir()
    for split, count in (LINES | {"train": train}).items():
        for language in ("en", "de"):
            lines = [f"word{n % 7} other{n % 5} {language} line {n}\n" for n in range(count)]
            (texts / f"{split}.{language}").write_text("".join(lines))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts")
    return tmp_path / "texts"


def run(texts: Path, *more: str) -> int:
    arguments = ["corpus=files", f"texts={texts}", "source=en", "target=de", "merges=30", "jobs=1"]
    return prepare.main([*arguments, f"output={texts.parent}/out", *more])


def corpus_of(folder: Path) -> Corpus:
    data = ["data=folder", "data.source=en", "data.target=de", f"data.path={folder}"]
    return Corpus(compose_config("transformer", data).data)


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        ({}, ["merges=null"], "corpus=files: merges missing"),
        ({}, ["validation=held_out"], "validation=held_out: not for corpus=files, expected only cleaning, merges, sou"),
        ({"test.de": "one line\n"}, [], "test.en (6 lines) and test.de (1 lines) differ in length"),
        ({"train.en": "", "train.de": ""}, [], "train.en and train.de have no lines"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    texts: Path, spoil: dict[str, str], more: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    for name, content in spoil.items():
        (texts / name).write_text(content)
    assert run(texts, *more) == 2
    assert message in capsys.readouterr().err


def test_edited_texts_are_other_data(texts: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(texts) == run(texts) == 0
    for side in ("train.en", "valid.de"):
        before = (texts / side).read_text()
        (texts / side).write_text(before.replace("line 3", "line 3a"))
        assert run(texts) == 2
        error = capsys.readouterr().err
        assert f"output={texts.parent}/out: holds other data (sha256 of {side}: " in error
        assert error.count("sha256 of") == 1
        (texts / side).write_text(before)
    assert run(texts) == 0


def test_no_pair_is_dropped_unless_it_is_asked_for(texts: Path, capsys: pytest.CaptureFixture) -> None:
    (texts / "train.de").write_text("much longer than the other side, by far, in all of the pairs\n" * 60)
    assert run(texts) == 0
    assert "train: 60 pairs" in capsys.readouterr().out
    assert run(texts, "cleaning=length_ratio", f"output={texts.parent}/clean") == 2
    assert "split train: expected at least one pair of lines, got none after cleaning" in capsys.readouterr().err
    arguments = ["data=folder", "data.source=en", "data.target=de", f"data.path={texts.parent}/out"]
    with pytest.raises(ConfigError, match=r"has empty_lines; .*corpus=files cleaning=length_ratio output="):
        check_preparation(compose_config("transformer", [*arguments, "data.cleaning=length_ratio"]).data)
    with pytest.raises(ConfigError, match=r"has no record of it; expected what it has, or null$"):
        check_preparation(compose_config("transformer", [*arguments, "data.validation=held_out"]).data)


def test_work_that_was_being_removed_is_not_continued(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def interrupted(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt
        remove(folder, ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        assert run(texts) == 130
    remove(texts.parent / "out")
    assert run(texts) == 2


def test_unfinished_work_with_other_texts_is_not_continued(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "encode_chunk", interrupted)
        assert run(texts) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    (texts / "train.en").write_text((texts / "train.en").read_text().replace("line 3", "line 3a"))
    assert run(texts) == 2
    assert "out.work holds unfinished work with other settings" in capsys.readouterr().err


def test_byte_order_marks_and_carriage_returns_are_no_part_of_references(texts: Path) -> None:
    assert run(texts, f"output={texts.parent}/clean") == 0
    for side in texts.iterdir():
        side.write_bytes(b"\xef\xbb\xbf" + side.read_bytes().replace(b"\n", b"\r\n"))
    assert run(texts) == 0
    clean, marked = texts.parent / "clean", texts.parent / "out"
    for file in (file for file in clean.rglob("*") if file.is_file() and file.name != "prepared.json"):
        assert (marked / file.relative_to(clean)).read_bytes() == file.read_bytes(), file
    raw = marked / "raw" / "test.de"
    raw.write_bytes(b"\xef\xbb\xbf" + raw.read_bytes().replace(b"\n", b"\r\n"))  # put there by hand
    assert corpus_of(marked).references("test") == corpus_of(clean).references("test")


def test_a_line_that_is_not_utf_8_is_named(texts: Path, capsys: pytest.CaptureFixture) -> None:
    lines = (texts / "train.de").read_bytes().splitlines(keepends=True)
    lines[41] = "naïve\n".encode("latin-1")
    (texts / "train.de").write_bytes(b"".join(lines))
    assert run(texts) == 2
    assert f"{texts}/train.de, line 42: expected UTF-8, found byte 0xef, number 3 of the" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"#version: 0.2\ne r</w>\nbroken\nl i", ", line 3: expected two subwords and a space, found 'broken'"),
        (b"#version: 0.2\ne r</w>\na b c\n", ", line 3: expected two subwords and a space, found 'a b c'"),
        (b"#version: new\ne r</w>\n", ", line 1: expected `#version: N.N`, found"),
        (b"#version: 0.2\ne r</w>\nl \xe9\n", ", line 3: expected UTF-8, found byte 0xe9, number 3 of the line"),
        (b"", ", line 1: expected two subwords and a space, found ''"),
        (None, ": cannot be read (No such file or directory)"),
    ],
)
def test_broken_codes_are_named_with_their_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bpe.codes"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{file}{message}")):
        Subwords(file)


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for file in folder.glob(name):
            file.write_bytes(change(file.read_bytes()))

    return edit


DICTIONARY, INDEX, TOKENS = "dict.*.txt", "train.en-de.en.idx", "valid.en-de.de.bin"


@pytest.fixture(scope="module", params=[True, False], ids=["recorded", "as fairseq-preprocess leaves a folder"])
def whole(request: pytest.FixtureRequest, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that can be read, with and without a record of their preparation."""
    folder = shutil.copytree(data_folder, tmp_path_factory.mktemp("whole") / "data")
    if not request.param:
        (folder / "prepared.json").unlink()
    assert len(corpus_of(folder).split("train")) == 300
    return folder


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edited(DICTIONARY, lambda content: b"\xff\xfe 3\n" + content), r"dict\.en\.txt"),
        (edited(DICTIONARY, lambda content: content + content.splitlines()[0] + b"\n"), r"dict\.en\.txt"),
        (edited(DICTIONARY, lambda content: b"\n".join(content.splitlines()[:5]) + b"\n"), "dict"),
        (edited(DICTIONARY, lambda _: b""), "dict"),
        (edited(INDEX, lambda content: content[:20]), r"train\.en-de\.en is not fairseq's"),
        (edited(INDEX, lambda content: content[:200]), r"train\.en-de\.en is not fairseq's"),
        (edited(INDEX, lambda _: b""), r"train\.en-de\.en is not fairseq's"),
        (edited(TOKENS, lambda content: content[:-2]), r"valid\.en-de\.de\.bin has \d+ bytes, expected"),
        (edited(TOKENS, lambda _: b""), r"valid\.en-de\.de"),
    ],
)
def test_damaged_data_do_not_pass_the_door(
    spoil: Callable[[Path], None], message: str, whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "data")
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        [corpus_of(folder).split(split) for split in ("train", "valid")]


@pytest.mark.parametrize("content", ["{", "{}", '{"recipe": 3, "sha256": {}}'])
def test_a_damaged_record_is_named(content: str, data_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data_folder, tmp_path / "data")
    (folder / "prepared.json").write_text(content)
    with pytest.raises(ConfigError, match=r"data/prepared\.json: damaged; remove the folder and prepare it again"):
        corpus_of(folder)


@pytest.mark.slow
def test_a_signal_ends_it_at_once_in_one_line_and_it_goes_on(tmp_path: Path) -> None:
    texts, work, log = tmp_path / "texts", tmp_path / "out.work", tmp_path / "log"
    write_texts(texts, train=24_000)
    command = [sys.executable, "-m", "transformer.prepare", "corpus=files", f"texts={texts}", "source=en", "target=de"]
    command += ["merges=30", "jobs=3", f"output={tmp_path}/out"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, start_new_session=True)
    wait_for(lambda: list(work.glob("tokenized/*")))
    for _ in range(3):  # to the whole group, as a terminal and Slurm do
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert process.wait(60) == 128 + signal.SIGINT
    assert log.read_text().splitlines() == ["interrupted"]
    assert run(texts) == 0
    with pytest.raises(ProcessLookupError):  # nobody is left of the group
        os.killpg(process.pid, 0)
    assert len(corpus_of(tmp_path / "out").split("train")) == 24_000
