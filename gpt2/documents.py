"""Documents: their files on this machine, on the Hugging Face hub or in Python's standard library, and their texts.

A row of .parquet or a line of .jsonl is a document; .txt and .py files hold one document, or several separated by
<|endoftext|> lines. At most one document is in memory at a time, or ROWS of a parquet file.
"""

import codecs
import contextlib
import glob
import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.cli import one_line
from gpt2.token_files import DataError

OPENWEBTEXT = "Skylion007/openwebtext"  # the copy in parquet; the original loading script no longer works
STDLIB = "python_stdlib"
STDLIB_WITHOUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
SUFFIXES = (".parquet", ".jsonl", ".txt", ".py")
ROWS = 64  # rows of a parquet file in memory at a time
READ_AHEAD = 1 << 20  # bytes of a column in memory at a time; otherwise pyarrow reads a whole row group
SEPARATOR = re.compile(r"<\|endoftext\|>[ \t]*\r?\n?")


@dataclass(frozen=True)
class InputFile:
    """A file of documents; `name` identifies it in the list of inputs, wherever the files are."""

    name: str
    path: Path


def find_inputs(source: str, revision: str = "main") -> list[InputFile]:
    """List the files of a source in the order of their names.

    source:   python_stdlib, openwebtext, hub:OWNER/NAME, or a file, folder or glob
    revision: branch, tag or commit on the hub

    Raises DataError if there are none.
    """
    if source == STDLIB:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(_stdlib_files(folder))
        expected = f"source={source}: {folder} holds no .py files; expected Python's own sources"
    elif source == "openwebtext" or source.startswith("hub:"):
        folder = _download(OPENWEBTEXT if source == "openwebtext" else source.removeprefix("hub:"), revision)
        files = sorted(folder.rglob("*.parquet"), key=Path.as_posix)
        expected = (
            f"source={source} holds no parquet files at revision={revision}; the hub's own conversion is "
            "revision=refs/convert/parquet"
        )
    else:
        folder, files = _local_files(source)
        expected = (
            f"source={source}: no {', '.join(SUFFIXES)} files there; expected openwebtext, {STDLIB}, "
            "hub:OWNER/NAME, or a file, folder or glob"
        )
    if not files:
        raise DataError(expected)
    return [InputFile(file.relative_to(folder).as_posix(), file) for file in files]


def _stdlib_files(folder: Path) -> Iterator[Path]:
    """Yield Python's own sources without tests, tables of data, and packages that pip installed."""
    for root, folders, names in os.walk(folder):
        folders[:] = set(folders) - STDLIB_WITHOUT  # not even walked: packages hold many files
        yield from (Path(root) / name for name in names if name.endswith(".py"))


def _download(repository: str, revision: str) -> Path:
    """Download the parquet files of a data set on the hub unless they are in its cache, and return their folder."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().dataset_info(repository, revision=revision).sha  # offline, the cache may be incomplete
        return Path(snapshot_download(repository, repo_type="dataset", revision=commit, allow_patterns="*.parquet"))
    except Exception as error:  # the hub's errors, and any from the HTTP client that its library uses
        raise DataError(
            f"{repository} at revision={revision} cannot be reached on the hub ({one_line(error):.200}); where there "
            "is no network give the folder that holds the parquet files: source=FOLDER"
        ) from error


def _local_files(source: str) -> tuple[Path, list[Path]]:
    """Return a folder and files of a known kind there: a single one, all below a folder, or all that match a glob.

    Hidden files, files of other kinds and links to folders are left out, with a warning that says how many.
    """
    folder = Path(source)
    if folder.is_dir():
        found = {file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()}
        hidden = {file for file in found if any(part.startswith(".") for part in file.relative_to(folder).parts)}
    else:
        matches = [folder] if folder.is_file() else map(Path, glob.glob(source, recursive=True))
        longest_first = sorted(matches, key=lambda file: len(file.parts), reverse=True)
        # A glob follows links to folders; each file counts once, under its last path here, which is the shortest.
        found = set({(os.path.realpath(file.parent), file.name): file for file in longest_first}.values())
        hidden = set()
        folder = Path(os.path.commonpath([file.parent for file in found])) if found else folder
    files = {file for file in found - hidden if file.suffix.lower() in SUFFIXES and file.is_file()}
    if left_out := sorted(found - files):
        what = f"{len(left_out)} skipped (hidden, of another type, or a folder), such as {left_out[0]}"
        logging.warning("source=%s: %s", source, what)
    return folder, sorted(files)


def read(file: InputFile, text_key: str) -> Iterator[str]:
    """Yield the documents of a file.

    text_key: column or JSON key that holds the text

    Raises DataError naming file and position of anything that is not a document.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    with _opened(file.path) as stream:
        yield from readers.get(file.path.suffix.lower(), _read_text)(file.path, stream, text_key)


def count(file: InputFile, text_key: str) -> int:
    """Return the number of documents in a file. Raises DataError as `read` does."""
    if file.path.suffix.lower() == ".parquet":  # its metadata has the number
        with _opened(file.path) as stream:
            return _open_parquet(file.path, stream, text_key).metadata.num_rows
    return sum(1 for _ in read(file, text_key))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)})") from error


def _read_text(path: Path, stream: BinaryIO, _: str) -> Iterator[str]:
    lines: list[str] = []
    for number, line in enumerate(stream, start=1):
        try:
            # A byte order mark is not text.
            text = (line if number > 1 else line.removeprefix(codecs.BOM_UTF8)).decode()
        except UnicodeDecodeError as error:
            found = f"found byte {error.object[error.start]:#04x} ({error.reason})"
            raise DataError(
                f"{path}, line {number}: expected UTF-8, {found} in {line[:100].decode(errors='replace')!r}; convert "
                "the file, as by iconv -f latin1 -t utf8"
            ) from error
        if SEPARATOR.fullmatch(text):
            yield "".join(lines)
            lines.clear()
        elif text:
            lines.append(text)
    if lines:
        yield "".join(lines)


def _read_jsonl(path: Path, stream: BinaryIO, text_key: str) -> Iterator[str]:
    offset = 0
    for line in stream:
        where = f"{path}, byte {offset}"
        offset += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({one_line(error)})") from error
        yield _text(record.get(text_key) if isinstance(record, dict) else None, text_key, where)


def _read_parquet(path: Path, stream: BinaryIO, text_key: str) -> Iterator[str]:
    row = 0
    batches = _open_parquet(path, stream, text_key).iter_batches(ROWS, columns=[text_key])
    while True:
        try:
            texts = next(batches).column(0).to_pylist()
        except StopIteration:
            return
        except ValueError as error:  # damaged, or not UTF-8
            raise DataError(f"{path}, row {row} or one of the {ROWS} after it: {one_line(error)}") from error
        for text in texts:
            yield _text(text, text_key, f"{path}, row {row}, counted from 0")
            row += 1


def _open_parquet(path: Path, stream: BinaryIO, text_key: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(stream, buffer_size=READ_AHEAD, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({one_line(error)})") from error
    names = opened.schema_arrow.names
    if text_key not in names:
        raise DataError(f"{path}: no column {text_key!r}; set text_key to one of: {', '.join(names)}")
    return opened


def _text(value: object, text_key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {text_key}={type(value).__name__}, expected text; see the key text_key")
    return value
