"""Encode documents with several threads into train.bin and val.bin, resuming where an earlier call stopped."""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from common.atomic import write_atomically
from common.cli import one_line
from gpt2.documents import InputFile, read
from gpt2.token_files import DTYPE, LARGEST_VOCABULARY, SPLITS, DataError
from gpt2.tokenizer import Tokenizer

PROGRESS = "progress.json"
BATCH = 1 << 20  # characters that a thread encodes at a time, at least
BATCHES_BETWEEN_SAVES = 8  # of each thread: a few seconds
CHUNK = 1 << 20  # tokens in memory at a time

Labelled = tuple[str, str]  # text and split of a document


def labelled(files: Iterable[InputFile], text_key: str, validation: set[int]) -> Iterator[Labelled]:
    """Yield all documents in order with their splits; `validation` has the numbers of the validation documents."""
    texts = itertools.chain.from_iterable(read(file, text_key) for file in files)
    return ((text, "val" if number in validation else "train") for number, text in enumerate(texts))


def batches(documents: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    """Yield the documents in lists of at least BATCH characters, except for the last."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[0]) + 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(batch: list[Labelled], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the tokens of each split, with end-of-text after each document.

    Raises DataError naming a document that cannot be encoded.
    """
    end = np.array([tokenizer.end_of_text], DTYPE)
    tokens: dict[str, list[NDArray[np.uint16]]] = {split: [end[:0]] for split in SPLITS}
    for text, split in batch:
        try:
            tokens[split] += [tokenizer.encode(text), end]
        except ValueError as error:
            raise DataError(
                f"tokenizer={tokenizer.name}: cannot encode the {len(text):,} characters that begin with "
                f"{text[:60]!r} ({one_line(error)}); shorten or remove the document"
            ) from error
    return {split: np.concatenate(arrays).tobytes() for split, arrays in tokens.items()}


def encode_all(
    documents: Iterable[Labelled], tokenizer: Tokenizer, folder: Path, fingerprint: str, threads: int, bar: tqdm
) -> None:
    """Write train.bin and val.bin in the folder.

    fingerprint: identifies the result; if the folder holds part of another one, everything is written anew
    bar:         counts documents
    """
    done = resumable(folder, fingerprint)
    bar.update(done["documents"])
    todo = batches(itertools.islice(documents, done["documents"], None))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))  # tokenizers do not hold Python's lock
        files = {split: stack.enter_context((folder / f"{split}.bin").open("ab")) for split in SPLITS}
        for split, file in files.items():
            file.truncate(done["bytes"][split])  # what was written after the last save
        while ahead := list(itertools.islice(todo, BATCHES_BETWEEN_SAVES * threads)):
            for contents in pool.map(partial(encode, tokenizer=tokenizer), ahead):
                for split, file in files.items():
                    file.write(contents[split])
            save(folder, done, sum(map(len, ahead)), files)
            bar.update(done["documents"] - bar.n)


def save(folder: Path, done: dict[str, Any], documents: int, files: dict[str, BinaryIO]) -> None:
    """Record that this many more documents are in the files; a later call continues after them."""
    for split, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        done["bytes"][split] = os.fstat(file.fileno()).st_size
    done["documents"] += documents
    write_atomically(folder / PROGRESS, json.dumps(done).encode())


def resumable(folder: Path, fingerprint: str) -> dict[str, Any]:
    """Return the progress saved in a folder, or no progress if it is for other data or the files are shorter."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        done = json.loads((folder / PROGRESS).read_text())
        sizes = {split: (folder / f"{split}.bin").stat().st_size for split in SPLITS}
        if done["fingerprint"] == fingerprint and all(sizes[split] >= done["bytes"][split] for split in SPLITS):
            return done
    return {"fingerprint": fingerprint, "documents": 0, "bytes": dict.fromkeys(SPLITS, 0)}


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
