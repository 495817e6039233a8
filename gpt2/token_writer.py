"""Writing train.bin and val.bin so that an interrupted preparation can continue and a finished one is complete."""

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.training.atomic import write_atomically
from gpt2.token_files import DTYPE, HEADER, LARGEST_VOCABULARY, SPLITS, Header

PROGRESS = "progress.json"
SECONDS_BETWEEN_SAVES = 5.0
CHUNK = 1 << 20  # tokens, or bytes, handled at a time


@dataclass
class Progress:
    """How far a preparation has come.

    fingerprint: identifies inputs and settings
    units:       units written
    documents:   {split: documents written}
    bytes:       {split: size of the file}
    """

    fingerprint: str
    units: int
    documents: dict[str, int]
    bytes: dict[str, int]


class TokenWriter:
    """Writer that appends encoded units to train.bin.partial and val.bin.partial.

    It continues what the folder holds if that was begun with the same fingerprint, and otherwise starts again. `counts`
    [65536] is the number of occurrences of each token.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        self.progress = self._read_progress(fingerprint)
        for split in SPLITS:  # killed between renaming and the header
            if not self._partial(split).exists() and self._final(split).exists():
                self._final(split).rename(self._partial(split))
        sizes = {split: self._partial(split).stat().st_size if self._partial(split).exists() else 0 for split in SPLITS}
        if any(sizes[split] < self.progress.bytes[split] for split in SPLITS):
            self.progress = begin(fingerprint)
        self._files = {split: self._partial(split).open("ab") for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(self.progress.bytes[split])  # what was written after the last save
            file.seek(0, os.SEEK_END)
        self.counts = np.zeros(LARGEST_VOCABULARY, np.int64)
        for split in SPLITS:
            self.counts += count_tokens(self._partial(split))
        self._saved = time.monotonic()

    def append(self, part: Path, documents: dict[str, int]) -> None:
        """Append the files of the next unit, with their number of documents, and remove them."""
        for split, file in self._files.items():
            source = part.with_suffix(f".{split}")
            self.counts += count_tokens(source)
            with source.open("rb") as stream:
                shutil.copyfileobj(stream, file, CHUNK)
            source.unlink()
        done = self.progress
        # In one statement: what is saved after an interruption at any point holds the unit in both splits or in none.
        self.progress = Progress(
            done.fingerprint,
            done.units + 1,
            {split: done.documents[split] + documents[split] for split in SPLITS},
            {split: file.tell() for split, file in self._files.items()},
        )
        if time.monotonic() - self._saved > SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Save the progress, so that a later start continues from here."""
        self._sync()
        write_atomically(self._folder / PROGRESS, json.dumps(asdict(self.progress)).encode())
        self._saved = time.monotonic()

    def finish(self, header: Header) -> None:
        """Give the files their final names, then write the header, which completes the data."""
        self.save()
        self.close()
        for split in SPLITS:
            self._partial(split).replace(self._final(split))
        write_atomically(self._folder / HEADER, header.to_json().encode())
        (self._folder / PROGRESS).unlink()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _read_progress(self, fingerprint: str) -> Progress:
        try:
            found = Progress(**json.loads((self._folder / PROGRESS).read_text()))
        except (OSError, ValueError, TypeError):
            return begin(fingerprint)
        return found if found.fingerprint == fingerprint else begin(fingerprint)

    def _partial(self, split: str) -> Path:
        return self._folder / f"{split}.bin.partial"

    def _final(self, split: str) -> Path:
        return self._folder / f"{split}.bin"


def begin(fingerprint: str) -> Progress:
    """Return the progress before anything is written."""
    return Progress(fingerprint, 0, dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0))


def count_tokens(file: Path) -> NDArray[np.int64]:
    """Count the occurrences of each token in a file, [65536], in bounded memory."""
    counts = np.zeros(LARGEST_VOCABULARY, np.int64)
    with file.open("rb") as stream:
        while len(tokens := np.fromfile(stream, DTYPE, CHUNK)):
            counts += np.bincount(tokens, minlength=LARGEST_VOCABULARY)
    return counts


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of tokens with these counts: the loss of the best model that ignores context."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
