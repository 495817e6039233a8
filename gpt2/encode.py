"""Encoding documents with several threads into train.bin and val.bin, going on where an earlier call stopped."""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from common.atomic import write_atomically
from gpt2.documents import read
from gpt2.sources import InputFile, one_line
from gpt2.token_files import DTYPE, LARGEST_VOCABULARY, SPLITS, DataError
from gpt2.tokenizer import Tokenizer

PROGRESS = "progress.json"
SECONDS_BETWEEN_SAVES = 5.0
BATCH = 1 << 20  # characters that a thread encodes at a time, at least
CHUNK = 1 << 20  # tokens in memory at a time

Labelled = tuple[str, bool, bool]  # text, whether a document ends with it, whether that is held out for validation


def pieces(files: Iterable[InputFile], text_key: str, validation: set[int]) -> Iterator[Labelled]:
    """Yield the pieces of all documents in order; `validation` has the numbers of those that are held out."""
    document = 0
    for file in files:
        for text, ends in read(file, text_key):
            yield text, ends, document in validation
            document += ends


def batches(labelled: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    """Yield the pieces in lists of at least BATCH characters, except for the last."""
    batch, size = [], 0
    for piece in labelled:
        batch.append(piece)
        size += len(piece[0]) + 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(batch: list[Labelled], tokenizer: Tokenizer) -> tuple[list[bytes], int]:
    """Return the tokens of each split, end-of-text after each document, and the number of documents that end.

    Raises DataError naming a document that cannot be encoded.
    """
    end = np.array([tokenizer.end_of_text], DTYPE)
    splits = {split: [end[:0]] for split in SPLITS}
    for text, ends, held_out in batch:
        try:
            tokens = tokenizer.encode(text)
        except ValueError as error:
            raise DataError(
                f"tokenizer={tokenizer.name}: cannot encode the {len(text):,} characters that begin with "
                f"{text[:60]!r} ({one_line(error)}); shorten or remove the document"
            ) from error
        splits["val" if held_out else "train"] += [tokens, end[: int(ends)]]
    return [np.concatenate(arrays).tobytes() for arrays in splits.values()], sum(ends for _, ends, _ in batch)


def encode_ahead(
    labelled: Iterable[list[Labelled]], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[list[bytes], int]]:
    """Yield encode(batch, tokenizer) for each batch, in order; a few of them wait to be collected."""
    with ThreadPoolExecutor(threads) as pool:  # tokenizers do not hold Python's lock
        waiting: deque[Future[tuple[list[bytes], int]]] = deque()
        try:
            for batch in labelled:
                waiting.append(pool.submit(encode, batch, tokenizer))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def encode_all(
    labelled: Iterable[Labelled], tokenizer: Tokenizer, folder: Path, fingerprint: str, threads: int, bar: tqdm
) -> None:
    """Write train.bin and val.bin in the folder.

    fingerprint: identifies the result; what the folder holds of another one is written anew
    bar:         counts documents
    """
    done = resumable(folder, f"{fingerprint} {BATCH}")
    bar.update(done["documents"])
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("ab")) for split in SPLITS]
        for file, size in zip(files, done["bytes"], strict=True):
            file.truncate(size)  # what was written after the last save
        stack.callback(lambda: save(folder, done, files))
        todo = itertools.islice(batches(labelled), done["batches"], None)
        saved = time.monotonic()
        for contents, documents in stack.enter_context(contextlib.closing(encode_ahead(todo, tokenizer, threads))):
            for file, content in zip(files, contents, strict=True):
                file.write(content)
            # In one statement: what is saved after an interruption at any point holds the batch in full or not at all.
            done = done | {
                "batches": done["batches"] + 1,
                "documents": done["documents"] + documents,
                "bytes": [size + len(content) for size, content in zip(done["bytes"], contents, strict=True)],
            }
            bar.update(documents)
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                save(folder, done, files)
                saved = time.monotonic()


def save(folder: Path, done: dict[str, Any], files: Iterable[BinaryIO]) -> None:
    """Save the progress, so that a later call continues from here."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_atomically(folder / PROGRESS, json.dumps(done).encode())


def resumable(folder: Path, fingerprint: str) -> dict[str, Any]:
    """Return the progress that was saved in a folder, or none if it is of other data or the files are shorter."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        done = json.loads((folder / PROGRESS).read_text())
        sizes = [(folder / f"{split}.bin").stat().st_size for split in SPLITS]
        if done["fingerprint"] == fingerprint and np.all(np.greater_equal(sizes, done["bytes"])):
            return done
    return {"fingerprint": fingerprint, "batches": 0, "documents": 0, "bytes": [0] * len(SPLITS)}


def summarise(file: Path) -> tuple[NDArray[np.int64], str]:
    """Return how often each token occurs in a file, [65536], and the file's sha256, in bounded memory."""
    counts, digest = np.zeros(LARGEST_VOCABULARY, np.int64), hashlib.sha256()
    with file.open("rb") as stream:
        while len(tokens := np.fromfile(stream, DTYPE, CHUNK)):
            counts += np.bincount(tokens, minlength=LARGEST_VOCABULARY)
            digest.update(tokens)
    return counts, digest.hexdigest()


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of tokens with these counts: the loss of the best model that ignores context."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
