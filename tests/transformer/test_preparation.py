"""From archives to binarized data: the WMT14 recipe on tiny archives of the same format, resuming."""

import gzip
import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from common.config.config import ConfigError
from common.launch.compose import compose_config
from transformer import prepare
from transformer.config import Folder
from transformer.corpus import Corpus
from transformer.preparation import pipeline
from transformer.preparation.files import digest, read_lines
from transformer.preparation.wmt14 import DataManifest, read_manifest

pytestmark = pytest.mark.usefixtures("compat")

NOUNS = ["house", "cat", "street", "tree", "river", "window"]
TRAIN = [
    (f"The {a} sees the {b}, doesn't it? {i}", f"Das {a.upper()} sieht den {b.upper()}, nicht? {i}")
    for i, (a, b) in enumerate([(a, b) for a in NOUNS for b in NOUNS])
]
TRAIN += [(f"A {a} & more: \u201cyes\u201d. {a}", f"Ein {a.upper()} & mehr: \u201eja\u201c. {a}") for a in NOUNS]
UNEVEN = [("word " * 300, "Wort " * 300), ("a b c d e f g h", "a")]  # cleaning=length_ratio drops these
EMPTY = [("", "nothing"), ("nothing", " ")]  # always dropped
OURS = ["validation=newstest2013", "cleaning=length_ratio"]
NEWS = [(f"A {noun} & more: \u201cyes\u201d.", f"Ein {noun.upper()} & mehr: \u201eja\u201c.") for noun in NOUNS]


def archive(members: dict[str, bytes], mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        for name, content in members.items():
            information = tarfile.TarInfo(name)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    return stream.getvalue()


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def sgm(lines: list[str]) -> bytes:
    body = (f'<seg id="{i}">{line.replace("&", "&amp;")}</seg>' for i, line in enumerate(lines, start=1))
    return text(["<srcset>", '<doc docid="1">', "<p>", *body, "</p>", "</doc>", "</srcset>"])


@pytest.fixture
def wmt14(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataManifest:
    """Return the manifest of two tiny archives that are there; nothing listens where they come from."""
    pairs = [*TRAIN, *UNEVEN, *EMPTY]
    train = {"train.en": text([s for s, _ in pairs[:20]]), "train.de": text([t for _, t in pairs[:20]])}
    train |= {"more.en.gz": gzip.compress(text([s for s, _ in pairs[20:]]))}
    train |= {"more.de.gz": gzip.compress(text([t for _, t in pairs[20:]]))}
    news = {"src.en.sgm": sgm([s for s, _ in NEWS]), "ref.de.sgm": sgm([t for _, t in NEWS])}
    known, folder = {}, tmp_path / "archives"
    folder.mkdir()
    for name, content in {"train.tgz": archive(train, "w:gz"), "news.tar": archive(news, "w")}.items():
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest() if name == "train.tgz" else None
        known[name] = {"url": f"http://127.0.0.1:9/{name}", "bytes": len(content), "sha256": sha256, "md5": None}
    pair = {
        "source": "en",
        "target": "de",
        "merges": 100,
        "held_out_every": 9,
        "train": [["train.tgz", "train.en", "train.de"], ["train.tgz", "more.en.gz", "more.de.gz"]],
        "valid": ["news.tar", "src.en.sgm", "ref.de.sgm"],
        "test": ["news.tar", "src.en.sgm", "ref.de.sgm"],
    }
    manifest = DataManifest.model_validate({"archives": known, "pairs": {"wmt14_en_de": pair}})
    monkeypatch.setattr(prepare, "read_manifest", lambda: manifest)
    return manifest


def run(tmp_path: Path, *arguments: str) -> int:
    common = ["corpus=wmt14_en_de", f"output={tmp_path}/out", f"archives={tmp_path}/archives", "jobs=1"]
    return prepare.main([*common, *arguments])


def data_of(*overrides: str) -> Folder:
    return compose_config("transformer", ["data=wmt14_en_de", *overrides]).data


def words(corpus: Corpus, split: str) -> list[str]:
    side = corpus.split(split)
    return [corpus.words(side.target_tokens(i)) for i in range(len(side))]


def test_the_recipe_from_archives_to_tokens(wmt14: DataManifest, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, *OURS) == 0
    output = tmp_path / "out"
    told = capsys.readouterr().out
    assert f"train.tgz: sha256 {digest(tmp_path / 'archives/train.tgz')}, as in the manifest" in told
    assert "no checksum is known for this file" in told

    corpus = Corpus(prepare.NumberNames.model_construct(path=str(output), source="en", target="de"))
    assert [len(corpus.split(name)) for name in ("train", "valid", "test")] == [len(TRAIN), len(NEWS), len(NEWS)]
    assert words(corpus, "test")[0] == "Ein HOUSE &amp; mehr : &quot; ja &quot; ."  # normalised, tokenised, escaped
    assert words(corpus, "train")[1] == "Das HOUSE sieht den CAT , nicht ? 1"
    assert list(read_lines(output / "raw/test.de")) == [target for _, target in NEWS]
    assert corpus.references("valid") == ([target for _, target in NEWS], True)
    codes = (output / "bpe.codes").read_text().splitlines()
    assert len(codes) == 1 + 100
    assert (output / "dict.en.txt").read_bytes() == (output / "dict.de.txt").read_bytes()

    record = json.loads((output / "prepared.json").read_text())
    assert record["pairs"] == {"train": len(TRAIN), "valid": len(NEWS), "test": len(NEWS)}
    seen = {each["file"]: each for each in record["recipe"]["archives"]}
    assert seen["news.tar"]["sha256"] == digest(tmp_path / "archives/news.tar")
    assert all(digest(output / name) == value for name, value in record["sha256"].items())
    assert {"train.en-de.en.bin", "valid.en-de.de.idx", "bpe.codes"} <= record["sha256"].keys()
    assert not (tmp_path / "out.work").exists()


def test_the_papers_recipe_holds_out_training_lines_and_drops_empty_ones(wmt14: DataManifest, tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    lines = [*TRAIN, *UNEVEN, *EMPTY]
    held_out = [pair for number, pair in enumerate(lines, start=1) if number % 9 == 0]
    corpus = Corpus(data_of(f"data.path={tmp_path}/out"))
    train, valid = words(corpus, "train"), words(corpus, "valid")
    assert len(valid) == len([pair for pair in held_out if pair not in EMPTY]) == 4
    assert len(train) == len(TRAIN) + len(UNEVEN) - len(valid)
    assert max(map(len, train)) == len("Wort " * 300) - 1
    assert not set(train) & set(valid)
    record = json.loads((tmp_path / "out/prepared.json").read_text())["recipe"]
    assert (record["validation"], record["cleaning"]) == ("held_out", "empty_lines")


def test_held_out_lines_are_cut_like_training_lines(wmt14: DataManifest, tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    corpus = Corpus(data_of(f"data.path={tmp_path}/out", "data.max_length=6"))
    assert corpus.evaluated("valid").longest == corpus.split("train", 6).longest == 6
    assert corpus.evaluated("test").longest == corpus.split("test").longest > 6


def test_a_folder_that_was_prepared_otherwise_is_refused(wmt14: DataManifest, tmp_path: Path) -> None:
    assert run(tmp_path, *OURS) == 0
    path = f"data.path={tmp_path}/out"
    with pytest.raises(ConfigError, match=r"data\.validation=held_out: .*/out has newstest2013; another folder: "):
        Corpus(data_of(path))
    with pytest.raises(ConfigError, match=r"corpus=wmt14_en_de cleaning=empty_lines output=\.\.\.; expected"):
        Corpus(data_of(path, "data.validation=newstest2013"))
    for validation, cleaning in (("newstest2013", "length_ratio"), ("null", "null")):
        Corpus(data_of(path, f"data.validation={validation}", f"data.cleaning={cleaning}"))
    (tmp_path / "out/prepared.json").unlink()
    with pytest.raises(ConfigError, match="has no record of it"):
        Corpus(data_of(path))


def test_an_interrupted_preparation_goes_on_and_gives_the_same(
    wmt14: DataManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "Recipe", lambda *a, **k: pipeline.Recipe(*a, **k, chunk=8))
    assert run(tmp_path, f"output={tmp_path}/whole", "jobs=2") == 0
    original, done = pipeline.encode_chunk, []

    def breaks(*arguments: Any) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments[-1].name)
        original(*arguments)

    monkeypatch.setattr(pipeline, "encode_chunk", breaks)
    assert run(tmp_path) == 130
    assert not (tmp_path / "out").exists()
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "out.work").rglob("*.tsv")}
    assert sum("encoded" in file.parts for file in stamps) == 3
    again: list[str] = []
    monkeypatch.setattr(pipeline, "encode_chunk", lambda *a: (again.append(a[-1].name), original(*a))[1])
    monkeypatch.setattr(pipeline, "tokenize_chunk", lambda *_: pytest.fail("words are made twice"))
    assert run(tmp_path) == 0
    assert not set(again) & set(done)
    ours, whole = (json.loads((tmp_path / name / "prepared.json").read_text()) for name in ("out", "whole"))
    assert ours["sha256"] == whole["sha256"]


# -- archives


def test_an_archive_that_is_missing_or_damaged_is_named(
    wmt14: DataManifest, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "archives/news.tar").unlink()
    assert run(tmp_path) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert re.search(r"news\.tar: cannot be downloaded from http://\S+/news\.tar \(", error)
    (tmp_path / "archives/news.tar").write_bytes(b"other")
    assert run(tmp_path) == 2
    assert f"{tmp_path}/archives/news.tar: bytes is 5" in capsys.readouterr().err


def test_a_missing_member_and_uneven_sides_are_errors(
    wmt14: DataManifest, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "archives/news.tar"
    for members, problem in (
        ({"src.en.sgm": sgm(["one"])}, "has no member ref.de.sgm"),
        ({"src.en.sgm": sgm(["one"]), "ref.de.sgm": sgm(["eins", "zwei"])}, "have different numbers of lines"),
    ):
        content = archive(members, "w")
        file.write_bytes(content)
        changed = wmt14.archives["news.tar"].model_copy(update={"bytes": len(content)})
        wmt14.archives["news.tar"] = changed
        assert run(tmp_path, f"output={tmp_path}/{len(members)}") == 2
        assert f"{file}: " in (error := capsys.readouterr().err)
        assert problem in error


def test_the_manifest_in_the_repository_is_the_recipe() -> None:
    manifest = read_manifest()
    german, french = manifest.pairs["wmt14_en_de"], manifest.pairs["wmt14_en_fr"]
    assert (german.merges, french.merges) == (37_000, 32_000)
    assert {corpus.archive for corpus in german.train} == {"europarl", "common_crawl", "news_commentary"}
    assert {corpus.archive for corpus in french.train} == {
        *("europarl", "common_crawl", "news_commentary"),
        *("united_nations", "giga"),
    }
    for pair, language in ((german, "de"), (french, "fr")):
        assert "newstest2013" in pair.valid.source
        assert "newstest2014" in pair.test.source
        for corpus in (*pair.train, pair.valid, pair.test):
            assert corpus.source.removesuffix(".gz").removesuffix(".sgm").endswith(".en")
            assert corpus.target.removesuffix(".gz").removesuffix(".sgm").endswith(f".{language}")
    assert all(len(archive.sha256 or "0" * 64) == 64 for archive in manifest.archives.values())
