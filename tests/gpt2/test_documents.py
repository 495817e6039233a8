"""Documents out of parquet, JSON lines and text, from this machine and from the hub."""

import json
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from gpt2.documents import count, find_inputs, read
from gpt2.token_files import DataError

TEXTS = [f"document {i}\nwith ünicode and\n\na line more {'x' * i}" for i in range(40)]


def write_parquet(file, texts, rows=7, column="text"):
    table = pa.table({"id": range(len(texts)), column: texts})
    if isinstance(texts[0], bytes):
        table = table.set_column(
            1, column, pa.Array.from_buffers(pa.string(), len(texts), table[column].chunk(0).buffers())
        )
    parquet.write_table(table, file, row_group_size=rows)


def write_jsonl(file, texts):
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")


def write_text(file, texts):
    file.write_text("\n<|endoftext|>\n".join(texts))


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl, "txt": write_text}


def documents_of(files):
    """All documents of all files; checks their number, too."""
    found = []
    for file in files:
        documents = list(read(file, "text"))
        assert count(file, "text") == len(documents)
        found += documents
    return found


@pytest.mark.parametrize("kind", WRITERS)
def test_documents_come_back_whole_and_in_order(kind, tmp_path):
    WRITERS[kind](tmp_path / f"b.{kind}", TEXTS[20:])
    WRITERS[kind](tmp_path / f"a.{kind}", TEXTS[:20])
    expected = [f"{text}\n" for text in TEXTS] if kind == "txt" else TEXTS
    if kind == "txt":  # the line break before the separator belongs to the text; none is before the end of a file
        expected[19], expected[39] = TEXTS[19], TEXTS[39]
    assert documents_of(find_inputs(str(tmp_path))) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"no end of line", ["no end of line"]),
        (b"one\n<|endoftext|>\ntwo\n<|endoftext|>", ["one\n", "two\n"]),
        (b"one\r\n<|endoftext|>  \r\ntwo\r\n", ["one\r\n", "two\r\n"]),
        (b"not here: <|endoftext|>\n <|endoftext|>\n", ["not here: <|endoftext|>\n <|endoftext|>\n"]),
        (b"\xef\xbb\xbf<|endoftext|>\none\n", ["", "one\n"]),  # a byte order mark is no text and hides no separator
        (b"a\0b", ["a\0b"]),
    ],
)
def test_lines_that_separate_documents_in_text(content, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    assert documents_of(find_inputs(str(tmp_path / "a.txt"))) == expected


def test_sources_are_a_file_a_folder_or_a_glob(tmp_path):
    for name in ("x/1 ü.txt", "x/2.jsonl", "y/deep/3.parquet", "x/readme.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(source):
        return [file.name for file in find_inputs(str(source))]

    assert names(tmp_path) == ["x/1 ü.txt", "x/2.jsonl", "y/deep/3.parquet"]
    assert names(tmp_path / "x" / "1 ü.txt") == ["1 ü.txt"]
    assert names(f"{tmp_path}/x/*") == ["1 ü.txt", "2.jsonl"]
    assert names(f"{tmp_path}/*/*.txt") == ["1 ü.txt"]
    for nothing in (tmp_path / "no", tmp_path / "x" / "readme.md"):
        with pytest.raises(DataError, match="source="):
            find_inputs(str(nothing))


def test_how_many_are_left_out_is_said(tmp_path, caplog):
    for name in ("source/a.txt", "source/.hidden/2.txt", "source/3.gz", "elsewhere/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = tmp_path / "source"
    (source / "link").symlink_to("../elsewhere")
    assert [file.name for file in find_inputs(str(source))] == ["a.txt"]
    assert f"source={source}: 3 skipped (hidden, of another type, or a folder), such as {source}/.hidden" in caplog.text


def test_the_standard_library_is_python_without_tests_and_installed_packages():
    files = find_inputs("python_stdlib")
    names = {file.name for file in files}
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= names
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert sum(file.path.stat().st_size for file in files) > 5e6


JSON = b'{"text": "fine"}\n'
BROKEN = {
    r"a\.jsonl, byte 17: not JSON": ("a.jsonl", JSON + b'{"text": broken}\n'),
    r"a\.jsonl, byte 17: not JSON \(maximum recursion depth": ("a.jsonl", JSON + b"[" * 100_000 + b"\n"),
    r"a\.jsonl, byte 17: not JSON \('utf-8' codec": ("a.jsonl", JSON + b'{"text": "\xff"}\n'),
    r"a\.jsonl, byte 17: text=NoneType, expected text": ("a.jsonl", JSON + b'{"content": "x"}\n'),
    r"a\.parquet, row 1, counted from 0: text=NoneType, expected text": ("a.parquet", ["fine", None]),
    r"a\.parquet, row 64 or one of the 64 after it: 'utf-8' codec can't decode": ("a.parquet", [b"a"] * 70 + [b"\xff"]),
    r"a\.parquet: no column 'text'; set text_key to one of: id, content": ("a.parquet", "content"),
    r"a\.parquet: not a parquet file": ("a.parquet", b"nothing of the kind"),
    r"a\.txt, line 2: expected UTF-8, found byte 0xff \(invalid start byte\) in 'b.c": ("a.txt", b"a\nb\xffc\nd"),
    r"a\.txt: cannot be read": ("a.txt", None),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_no_document_is_named_with_its_place(message, tmp_path):
    name, content = BROKEN[message]
    file = tmp_path / name
    if isinstance(content, list):
        write_parquet(file, content)
    elif isinstance(content, str):
        write_parquet(file, ["fine"], column=content)
    else:
        file.write_bytes(content or b"x")
    files = find_inputs(str(tmp_path))
    if content is None:
        file.unlink()
    with pytest.raises(DataError, match=message):
        documents_of(files)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the folder of this machine that takes the place of OpenWebText's on the hub."""
    folder = tmp_path / "snapshot"
    (folder / "plain_text").mkdir(parents=True)

    class Api:
        def dataset_info(self, repository, revision):
            assert (repository, revision) == ("Skylion007/openwebtext", "refs/convert/parquet")
            return SimpleNamespace(sha="c0ffee")

    def snapshot_download(repository, repo_type, revision, allow_patterns):
        assert (repository, repo_type, revision) == ("Skylion007/openwebtext", "dataset", "c0ffee")
        assert allow_patterns == "*.parquet"
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return folder


def test_the_hubs_parquet_files_are_downloaded_at_one_commit(hub):
    for i, name in enumerate(["train-1.parquet", "train-0.parquet"]):
        write_parquet(hub / "plain_text" / name, TEXTS[20 * (1 - i) : 20 * (2 - i)])
    files = find_inputs("openwebtext", revision="refs/convert/parquet")
    assert [file.name for file in files] == ["plain_text/train-0.parquet", "plain_text/train-1.parquet"]
    assert documents_of(files) == TEXTS


def test_a_hub_out_of_reach_or_without_parquet_is_explained(hub, monkeypatch):
    with pytest.raises(DataError, match=r"holds no parquet files .* revision=refs/convert/parquet"):
        find_inputs("openwebtext", revision="refs/convert/parquet")

    def unreachable(*_):
        raise type("SomeClientsError", (Exception,), {})("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "HfApi", unreachable)
    with pytest.raises(DataError, match=r"cannot be reached on the hub \(Name or service not known\).*source=FOLDER"):
        find_inputs("openwebtext")
