"""Reading the prepared corpus: train.bin and val.bin, token ids as little-endian uint16, and header.json.

header.json is written last and atomically, so a folder that has it is complete.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from common.cli import one_line

DTYPE = np.dtype("<u2")
LARGEST_VOCABULARY = 1 << 16
HEADER = "header.json"
SPLITS = ("train", "val")


class DataError(ValueError):
    """Raised for data that is missing, damaged or unsuitable; the message names the file and what is expected."""


class PerSplit(TypedDict):
    """One number for each split."""

    train: int
    val: int


class Split(TypedDict):
    """How documents were divided: the share for validation, and the seed of the shuffle."""

    fraction: float
    seed: int


class Header(BaseModel):
    """The content of header.json.

    encoding:         name of the tokenizer (gpt2.tokenizer)
    vocabulary_size:  number of its tokens, end-of-text included
    end_of_text:      the token that ends every document
    largest_token:    largest token in the files
    unigram_entropy:  of all tokens of both splits, in nats: the loss of the best model that ignores context
    source:           source of the documents, as given to gpt2.prepare
    inputs:           {"files": number, "bytes": ..., "sha256": checksum of inputs.sha256, which lists all files,
                      "packages": name, version, sha256 and licence of each package that they come from, if any}
    settings:         everything in gpt2.prepare's command that shapes the files; empty: made before this was recorded
    vocabulary:       sha256 of vocabulary.tiktoken, "" if the tokenizer has none
    sha256:           {split: checksum of its file}; empty: made before this was recorded
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1]
    encoding: str
    vocabulary_size: int
    end_of_text: int
    largest_token: int
    tokens: PerSplit
    documents: PerSplit
    unigram_entropy: float
    source: str
    split: Split
    inputs: dict[str, Any]
    settings: dict[str, Any] = {}
    vocabulary: str = ""
    sha256: dict[str, str] = {}


def read_header(folder: Path) -> Header:
    """Read the header of a prepared folder. Raises DataError if it is missing or unusable."""
    file = folder / HEADER
    if not file.exists():
        started = " (a preparation was begun there: run the same command again)" if any(folder.glob("*.bin*")) else ""
        raise DataError(
            f"{file} is missing{started}; make the data with: "
            f"python -m gpt2.prepare {shlex.quote(f'output={folder}')} ..."
        )
    try:
        return Header.model_validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} is not a header of prepared data ({one_line(error)}); prepare the data again"
        ) from error


def open_tokens(folder: Path, header: Header, split: str) -> NDArray[np.uint16]:
    """Memory-map train.bin or val.bin, [tokens]. Raises DataError if its size differs from the header's."""
    file = folder / f"{split}.bin"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file} is missing ({error.strerror}); remove the folder and prepare it again") from error
    expected = header.tokens[split] * DTYPE.itemsize
    if size != expected:
        what = "truncated" if size < expected else "longer than it should be"
        raise DataError(
            f"{file} is {what}: {size} bytes, but {HEADER} says {header.tokens[split]} tokens, expected {expected}; "
            "remove the folder and prepare it again"
        )
    if size == 0:
        raise DataError(f"{file} is empty: the corpus is too small for this split")
    return np.memmap(file, DTYPE, "r")


def check_fits(folder: Path, header: Header, split: str, context: int, vocabulary: int, parts: int = 1) -> None:
    """Raise DataError unless each of the split's `parts` has context + 1 tokens, all of them within the vocabulary."""
    if header.tokens[split] // parts < context + 1:
        of_each = f" for each of {parts} ranks" if parts > 1 else ""
        raise DataError(
            f"{folder / split}.bin: {header.tokens[split]} tokens, expected at least {context + 1}{of_each} "
            f"(model.context={context} and the token after it)"
        )
    largest = max(header.largest_token, header.vocabulary_size - 1)
    if vocabulary <= largest:
        raise DataError(
            f"model.vocabulary={vocabulary}: {folder} holds encoding {header.encoding} with "
            f"{header.vocabulary_size} tokens, the largest in the files is {header.largest_token}; "
            f"expected at least {largest + 1}"
        )
