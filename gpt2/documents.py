"""Reading documents from files in bounded memory: parquet, JSON lines, and plain text."""

import codecs
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gpt2.sources import InputFile, one_line
from gpt2.token_files import DataError

BLOCK = 4 << 20  # bytes of plain text, extended to the end of a line, that are a piece of a document
ROWS = 64  # rows of a parquet file in memory at a time
READ_AHEAD = 1 << 20  # bytes of a column in memory at a time; otherwise pyarrow reads a whole row group
SEPARATOR = re.compile(rb"^<\|endoftext\|>[ \t]*\r?(?:\n|\Z)", re.MULTILINE)

Piece = tuple[str, bool]  # text, and whether a document ends with it


def read(file: InputFile, text_key: str) -> Iterator[Piece]:
    """Yield the pieces of a file's documents; only those of plain text have several.

    text_key: column or JSON key that holds the text

    Raises DataError naming file and position of anything that is not a document.
    """
    with _opened(file) as stream:
        match file.kind:
            case "parquet":
                yield from _read_parquet(file, stream, text_key)
            case "jsonl":
                yield from _read_jsonl(file, stream, text_key)
            case "text":
                yield from _read_text(file, stream)


def count(file: InputFile, text_key: str) -> int:
    """Return the number of documents in a file. Raises DataError as `read` does."""
    if file.kind == "parquet":  # it says so itself
        with _opened(file) as stream:
            return _open_parquet(file, stream, text_key).metadata.num_rows
    return sum(ends for _, ends in read(file, text_key))


def checksum(file: InputFile) -> str:
    """Return the sha256 of a file. Raises DataError if it cannot be read."""
    if file.sha256:
        return file.sha256
    with _opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _opened(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file, local or remote; what goes wrong with the disk or the network is a DataError with its name."""
    remote = "://" in file.location
    try:
        with _open_remote(file.location) if remote else Path(file.location).open("rb") as stream:
            yield stream
    except DataError:
        raise
    except Exception as error:
        if remote or isinstance(error, OSError):
            raise DataError(f"{file.location}: cannot be read ({one_line(error)})") from error
        raise


def _open_remote(url: str) -> BinaryIO:
    import fsspec

    return fsspec.open(url, "rb").open()


def _read_text(file: InputFile, stream: BinaryIO) -> Iterator[Piece]:
    """Yield pieces of the one document that a file is, or of several that lines <|endoftext|> separate."""
    start, rest = 0, b""
    while block := stream.read(BLOCK):
        block += stream.readline()
        if rest:
            yield _decoded(rest, file), False
        # A byte order mark is no text.
        *closed, rest = SEPARATOR.split(block if start else block.removeprefix(codecs.BOM_UTF8))
        for piece in closed:
            yield _decoded(piece, file), True
        start += len(block)
    if rest:
        yield _decoded(rest, file), True


def _decoded(piece: bytes, file: InputFile) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        line = piece[: error.start].rpartition(b"\n")[2] + piece[error.start :].partition(b"\n")[0]
        raise DataError(
            f"{file.location}: expected UTF-8, found byte {piece[error.start]:#04x} ({error.reason}) in the line "
            f"{line[:100].decode(errors='replace')!r}; convert the file, as by iconv -f latin1 -t utf8"
        ) from error


def _read_jsonl(file: InputFile, stream: BinaryIO, text_key: str) -> Iterator[Piece]:
    offset = 0
    for line in stream:
        where = f"{file.location}, byte {offset}"
        offset += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({one_line(error)})") from error
        yield _text(record.get(text_key) if isinstance(record, dict) else None, text_key, where), True


def _read_parquet(file: InputFile, stream: BinaryIO, text_key: str) -> Iterator[Piece]:
    row = 0
    for batch in _open_parquet(file, stream, text_key).iter_batches(ROWS, columns=[text_key]):
        for text in batch.column(0).to_pylist():
            yield _text(text, text_key, f"{file.location}, row {row}, counted from 0"), True
            row += 1


def _open_parquet(file: InputFile, stream: BinaryIO, text_key: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(stream, buffer_size=READ_AHEAD, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file.location}: not a parquet file ({one_line(error)})") from error
    names = opened.schema_arrow.names
    if text_key not in names:
        raise DataError(f"{file.location}: no column {text_key!r}; set text_key to one of: {', '.join(names)}")
    return opened


def _text(value: object, text_key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {text_key}={type(value).__name__}, expected text; see the key text_key")
    return value
