"""Documents out of parquet, JSON lines and text, however they are cut into units."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from gpt2 import documents
from gpt2.documents import read, scan
from gpt2.sources import InputFile, find_inputs
from gpt2.token_files import DataError

TEXTS = [f"document {i}\nwith ünicode and\n\na line more {'x' * i}" for i in range(40)]


def write_parquet(file, texts, rows=7, column="text"):
    parquet.write_table(pa.table({"id": range(len(texts)), column: texts}), file, row_group_size=rows)


def write_jsonl(file, texts):
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")


def write_text(file, texts):
    file.write_text("\n<|endoftext|>\n".join(texts))


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl, "txt": write_text}


def documents_of(files):
    """All documents of all files, put together from their pieces; checks what scanning promised."""
    found = []
    for file in files:
        scanned = scan(file)
        if file.sha256 is None:
            assert scanned.sha256 == hashlib.sha256(Path(file.location).read_bytes()).hexdigest()
        pending = ""
        for unit in scanned.units:
            ended = 0
            for text, ends in read(unit, "text"):
                pending += text
                if ends:
                    found.append(pending)
                    pending = ""
                    ended += 1
            assert ended == unit.documents
        assert pending == ""
        assert [unit.ends_file for unit in scanned.units[-1:]] in ([True], [])
    return found


@pytest.mark.parametrize("block", [16, 100, 1 << 20])
@pytest.mark.parametrize("kind", WRITERS)
def test_documents_come_back_whole_and_in_order(kind, block, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", block)
    WRITERS[kind](tmp_path / f"b.{kind}", TEXTS[20:])
    WRITERS[kind](tmp_path / f"a.{kind}", TEXTS[:20])
    found = documents_of(find_inputs(str(tmp_path)))
    expected = [f"{text}\n" for text in TEXTS] if kind == "txt" else TEXTS
    if kind == "txt":  # the line break before the separator belongs to the text; none is before the end of a file
        expected[19], expected[39] = TEXTS[19], TEXTS[39]
    assert found == expected
    units = [unit for file in find_inputs(str(tmp_path)) for unit in scan(file).units]
    assert len(units) == 6 if kind == "parquet" else (len(units) > 2) == (block < 1000)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("no end of line", ["no end of line"]),
        ("one\n<|endoftext|>\ntwo\n<|endoftext|>", ["one\n", "two\n"]),
        ("one\r\n<|endoftext|>  \r\ntwo\r\n", ["one\r\n", "two\r\n"]),
        ("not here: <|endoftext|>\n <|endoftext|>\n", ["not here: <|endoftext|>\n <|endoftext|>\n"]),
    ],
)
def test_lines_that_separate_documents_in_text(content, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert documents_of(find_inputs(str(tmp_path / "a.txt"))) == expected


def test_sources_are_a_file_a_folder_or_a_glob(tmp_path):
    for name in ("x/1.txt", "x/2.jsonl", "y/deep/3.parquet", "x/readme.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(source):
        return [(file.name, file.kind) for file in find_inputs(str(source))]

    assert names(tmp_path) == [("x/1.txt", "text"), ("x/2.jsonl", "jsonl"), ("y/deep/3.parquet", "parquet")]
    assert names(tmp_path / "x" / "1.txt") == [("1.txt", "text")]
    assert names(f"{tmp_path}/x/*") == [("1.txt", "text"), ("2.jsonl", "jsonl")]
    for nothing in (tmp_path / "no", tmp_path / "x" / "readme.md"):
        with pytest.raises(DataError, match="source="):
            find_inputs(str(nothing))


def test_links_are_followed_once_and_what_is_left_out_is_said(tmp_path, caplog):
    for name in ("source/a/1.txt", "source/B.TXT", "source/.hidden/2.txt", "source/3.gz", "elsewhere/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = tmp_path / "source"
    for link, target in (("shard", "../elsewhere"), ("again", "a"), ("loop", ".")):
        (source / link).symlink_to(target)
    assert [file.name for file in find_inputs(str(source))] == ["B.TXT", "a/1.txt", "shard/4.txt"]
    assert f"source={source}: left out are {source}/.hidden, {source}/3.gz" in caplog.text
    names = [Path(file.location).relative_to(source).as_posix() for file in find_inputs(f"{source}/**/*.txt")]
    assert names == ["a/1.txt", "shard/4.txt"]
    caplog.clear()
    assert [file.name for file in find_inputs(f"{source}/[Ba]*")] == ["B.TXT"]
    assert f"left out are {source}/a, {source}/again" in caplog.text


def test_a_byte_order_mark_is_no_text_and_hides_no_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 8)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf<|endoftext|>\none\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    assert documents_of(find_inputs(str(tmp_path))) == ["", "one\n", "two"]


def test_the_standard_library_is_python_without_tests_and_installed_packages():
    files = find_inputs("python_stdlib")
    names = {file.name for file in files}
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= names
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert sum(file.bytes for file in files) > 5e6


def broken(kind, tmp_path):
    match kind:
        case "json":
            (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
        case "deep":
            (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + "[" * 100_000 + "\n")
        case "key":
            (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"content": "x"}\n')
        case "null":
            write_parquet(tmp_path / "a.parquet", ["fine", None])
        case "column":
            write_parquet(tmp_path / "a.parquet", ["fine"], column="content")
        case "parquet":
            (tmp_path / "a.parquet").write_text("nothing of the kind")
        case "gone":
            return [InputFile("a.txt", str(tmp_path / "a.txt"), "text", 3)]
    return find_inputs(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("json", r"a\.jsonl, byte 17: not JSON"),
        ("key", r"a\.jsonl, byte 17: text=NoneType, expected text"),
        ("null", r"a\.parquet, row group 0, row 1 of it, counted from 0: text=NoneType, expected text"),
        ("deep", r"a\.jsonl, byte 17: not JSON \(maximum recursion depth"),
        ("column", r"a\.parquet: no column 'text'; set text_key to one of: id, content"),
        ("parquet", r"a\.parquet: not a parquet file"),
        ("gone", r"a\.txt: cannot be read"),
    ],
)
def test_what_is_no_document_is_named_with_its_place(kind, message, tmp_path):
    with pytest.raises(DataError, match=message):
        documents_of(broken(kind, tmp_path))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a data set on a hub that is a folder of this machine."""
    folder = tmp_path / "snapshot"
    (folder / "plain_text").mkdir(parents=True)
    asked = SimpleNamespace(revision=None, patterns=None)
    for i, name in enumerate(["train-1.parquet", "train-0.parquet"]):
        write_parquet(folder / "plain_text" / name, TEXTS[20 * (1 - i) : 20 * (2 - i)])

    class Api:
        def dataset_info(self, repository, revision):
            asked.revision = revision
            return SimpleNamespace(sha="c0ffee")

        def list_repo_tree(self, repository, repo_type, revision, recursive):
            assert (repository, repo_type, revision, recursive) == ("Skylion007/openwebtext", "dataset", "c0ffee", True)
            files = [file for file in folder.rglob("*") if file.is_file()]
            return [
                SimpleNamespace(
                    path=file.relative_to(folder).as_posix(), size=file.stat().st_size, lfs=SimpleNamespace(sha256="ab")
                )
                for file in files
            ] + [SimpleNamespace(path="README.md", size=1, lfs=None)]

    def snapshot_download(repository, repo_type, revision, allow_patterns):
        assert revision == "c0ffee"
        asked.patterns = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked, folder


def test_the_hubs_parquet_files_are_downloaded_at_one_commit(hub):
    files = find_inputs("openwebtext", revision="refs/convert/parquet")
    assert hub[0].revision == "refs/convert/parquet"
    assert hub[0].patterns == ["plain_text/train-0.parquet", "plain_text/train-1.parquet"]
    assert documents_of(files) == TEXTS


def test_the_hubs_files_are_streamed_with_the_checksums_that_it_knows(hub, monkeypatch):
    files = find_inputs("openwebtext", streaming=True)
    base = "hf://datasets/Skylion007/openwebtext@c0ffee/"
    assert [file.location for file in files] == [f"{base}plain_text/train-{i}.parquet" for i in (0, 1)]
    # The same files through fsspec's local URLs: what is read is a remote file to everything but fsspec.
    local = [InputFile(f.name, f.location.replace(base, f"file://{hub[1]}/"), f.kind, f.bytes, f.sha256) for f in files]
    assert documents_of(local) == TEXTS
    assert {scan(file).sha256 for file in local} == {"ab"}
    with pytest.raises(DataError, match="file:///nowhere: cannot be read"):
        scan(InputFile("a", "file:///nowhere", "parquet", 1, "ab"))


def test_a_hub_out_of_reach_or_without_parquet_is_explained(hub, monkeypatch):
    for file in hub[1].rglob("*.parquet"):
        file.unlink()
    with pytest.raises(DataError, match=r"holds no parquet files; .* revision=refs/convert/parquet"):
        find_inputs("openwebtext")

    def unreachable(*_):
        raise type("SomeClientsError", (Exception,), {})("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "HfApi", unreachable)
    with pytest.raises(DataError, match=r"cannot be reached on the hub \(Name or service not known\).*source=FOLDER"):
        find_inputs("openwebtext")
