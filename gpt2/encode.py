"""Encoding units of documents in parallel processes, each result in a separate file."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.interruptible import in_processes, server_context
from gpt2.documents import Unit, read
from gpt2.sources import one_line
from gpt2.token_files import DTYPE, SPLITS, DataError
from gpt2.tokenizer import Tokenizer, load_tokenizer

AHEAD = 4  # encoded units per process that may wait to be collected

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """A unit to encode.

    validation: numbers within the unit, from 0, of the documents that belong to the validation split
    vocabulary: checksum of the tokenizer's vocabulary file, "" if it has none
    folder:     folder of that file
    part:       the tokens are written to <part>.train and <part>.val
    """

    unit: Unit
    validation: tuple[int, ...]
    tokenizer: str
    vocabulary: str
    folder: Path
    text_key: str
    part: Path


def encode(job: Job) -> dict[str, int]:
    """Write the unit's tokens, end-of-text after each document; return the number of documents of each split.

    Raises DataError naming file and document where one cannot be encoded.
    """
    tokenizer = _tokenizer(job.tokenizer, job.folder, job.vocabulary)
    end = np.array([tokenizer.end_of_text], DTYPE)
    validation, document = set(job.validation), 0
    files = {split: job.part.with_suffix(f".{split}").open("wb") for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    try:
        for text, ends in read(job.unit, job.text_key):
            split = "val" if document in validation else "train"
            try:
                tokens = tokenizer.encode(text)
            except ValueError as error:
                raise DataError(
                    f"{job.unit.place}, document {document} of it, counted from 0: tokenizer={job.tokenizer} cannot "
                    f"encode its {len(text):,} characters ({one_line(error)}); shorten or remove it"
                ) from error
            _write(files[split], tokens)
            if ends:
                _write(files[split], end)
                counts[split] += 1
                document += 1
    finally:
        for file in files.values():
            file.close()
    return counts


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """Yield function(item) for each item, in order, computed ahead by `processes`; 1 works in this process.

    At most AHEAD results per process wait to be collected, for any number of items.
    """
    if processes == 1:
        yield from map(function, items)
        return
    # The server loads once what every process needs or would import again for its main module.
    context = server_context(["gpt2.encode", "common.cli", "gpt2.token_writer"])
    yield from in_processes(function, ((item,) for item in items), processes, AHEAD * processes, "processes", context)


@functools.lru_cache(1)
def _tokenizer(name: str, folder: Path, vocabulary: str) -> Tokenizer:
    return load_tokenizer(name, folder, vocabulary)


def _write(file: Any, tokens: NDArray[np.uint16]) -> None:
    file.write(tokens.astype(DTYPE, copy=False).tobytes())
