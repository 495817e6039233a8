"""Reading documents from files, in units small enough to process in parallel and in bounded memory."""

import codecs
import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt2.sources import InputFile, one_line
from gpt2.token_files import DataError

BLOCK = 4 << 20  # bytes in a unit of JSON lines or text, extended to the end of its last line
ROWS = 64  # rows of a parquet file in memory at a time
READ_AHEAD = 1 << 20  # bytes of a column in memory at a time; otherwise pyarrow reads a whole row group
SEPARATOR = re.compile(rb"^<\|endoftext\|>[ \t]*\r?(?:\n|\Z)", re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """A part of a file: bytes start..stop of a text file, or row group number `start` of a parquet file.

    documents: number of documents that end in it; a text longer than a unit continues in the next one
    ends_file: whether it is the last unit of the file
    """

    file: InputFile
    start: int
    stop: int
    documents: int
    ends_file: bool

    @property
    def place(self) -> str:
        """The unit's file and where in it the unit begins, for messages."""
        return f"{self.file.location}, {'row group' if self.file.kind == 'parquet' else 'byte'} {self.start}"


@dataclass(frozen=True)
class Scanned:
    """The result of one pass over a file: its checksum and its units."""

    sha256: str
    units: tuple[Unit, ...]


def scan(file: InputFile) -> Scanned:
    """Checksum a file and cut it into units. Raises DataError if it cannot be read."""
    with explained(file):
        return _scan_parquet(file) if file.kind == "parquet" else _scan_lines(file)


def read(unit: Unit, text_key: str) -> Iterator[tuple[str, bool]]:
    """Yield the unit's pieces of text, each with whether a document ends there.

    text_key: column or JSON key that holds the text

    Raises DataError naming file and position of anything that is not a document.
    """
    with explained(unit.file):
        match unit.file.kind:
            case "parquet":
                yield from _read_parquet(unit, text_key)
            case "jsonl":
                yield from _read_jsonl(unit, _read_bytes(unit), text_key)
            case "text":
                for piece, ends in split_text(_without_mark(_read_bytes(unit), unit.start), unit.ends_file):
                    yield piece.decode(errors="replace"), ends


@contextlib.contextmanager
def explained(file: InputFile) -> Iterator[None]:
    """Turn errors of the disk or of a remote file's reader into DataError with the file's name."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or "://" in file.location:
            raise DataError(f"{file.location}: cannot be read ({one_line(error)})") from error
        raise


def split_text(block: bytes, ends_file: bool) -> list[tuple[bytes, bool]]:
    """Split plain text into pieces, each with whether a document ends there.

    A file is one document, or several if lines <|endoftext|> separate them.
    """
    *closed, rest = SEPARATOR.split(block)
    pieces = [(piece, True) for piece in closed]
    return [*pieces, (rest, ends_file)] if rest else pieces


def open_input(file: InputFile) -> BinaryIO:
    """Open the file, local or remote."""
    if "://" not in file.location:
        return open(file.location, "rb")
    import fsspec

    return fsspec.open(file.location, "rb").open()


def _scan_lines(file: InputFile) -> Scanned:
    digest, units, start = hashlib.sha256(), [], 0
    with open_input(file) as stream:
        while block := stream.read(BLOCK):
            block += stream.readline()
            digest.update(block)
            stop = start + len(block)
            ends_file = stop >= file.bytes
            if file.kind == "text":
                documents = sum(ends for _, ends in split_text(_without_mark(block, start), ends_file))
            else:
                documents = sum(1 for line in block.split(b"\n") if line.strip())
            units.append(Unit(file, start, stop, documents, ends_file))
            start = stop
    if start != file.bytes:
        raise DataError(f"{file.location}: {start} bytes read, expected {file.bytes}: the file is being written")
    return Scanned(digest.hexdigest(), tuple(units))


def _scan_parquet(file: InputFile) -> Scanned:
    with open_input(file) as stream:
        digest = file.sha256 or hashlib.file_digest(stream, "sha256").hexdigest()
        groups = _open_parquet(file, stream).metadata
        rows = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
    last = len(rows) - 1
    return Scanned(digest, tuple(Unit(file, i, i + 1, count, i == last) for i, count in enumerate(rows)))


def _read_parquet(unit: Unit, text_key: str) -> Iterator[tuple[str, bool]]:
    row = 0
    with open_input(unit.file) as stream:
        parquet = _open_parquet(unit.file, stream)
        if text_key not in parquet.schema_arrow.names:
            names = ", ".join(parquet.schema_arrow.names)
            raise DataError(f"{unit.file.location}: no column {text_key!r}; set text_key to one of: {names}")
        for batch in parquet.iter_batches(ROWS, row_groups=[unit.start], columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield _text(text, text_key, f"{unit.place}, row {row} of it, counted from 0"), True
                row += 1


def _open_parquet(file: InputFile, stream: BinaryIO) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(stream, buffer_size=READ_AHEAD, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file.location}: not a parquet file ({one_line(error)})") from error


def _read_jsonl(unit: Unit, block: bytes, text_key: str) -> Iterator[tuple[str, bool]]:
    offset = unit.start
    for line in block.split(b"\n"):
        where = f"{unit.file.location}, byte {offset}"
        offset += len(line) + 1
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({one_line(error)})") from error
        text = record.get(text_key) if isinstance(record, dict) else None
        yield _text(text, text_key, where), True


def _text(value: object, text_key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {text_key}={type(value).__name__}, expected text; see the key text_key")
    return value


def _without_mark(block: bytes, start: int) -> bytes:
    """Remove the byte order mark with which a file of text may begin."""
    return block.removeprefix(codecs.BOM_UTF8) if start == 0 else block


def _read_bytes(unit: Unit) -> bytes:
    with open_input(unit.file) as stream:
        stream.seek(unit.start, io.SEEK_SET)
        block = stream.read(unit.stop - unit.start)
    if len(block) != unit.stop - unit.start:
        raise DataError(f"{unit.file.location}: shorter than when it was scanned")
    return block
