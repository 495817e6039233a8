"""Tokenizers: GPT-2's own, bytes, and a small BPE trained from the corpus; each has an end-of-text token.

gpt2      tiktoken's GPT-2 encoding, 50,257 tokens; its two vocabulary files are downloaded once
bytes     256 bytes and end-of-text; nothing to download
bpe_N     byte-level BPE with N tokens in all, trained from the training documents; nothing to download
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray

from common.atomic import write_atomically
from gpt2.token_files import LARGEST_VOCABULARY, DataError

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = "vocabulary.tiktoken"  # of a trained BPE, next to train.bin; lines "base64(token) rank"
# How GPT-2 splits text into words before merging bytes, in tiktoken's faster form of the released pattern.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
SPACES = re.compile(r"[^\S\x1c-\x1f]+")  # what \s+ means in WORDS
BYTES = r"[\s\S]{1,1000}"  # instead of WORDS, where bytes are not merged
LONG_RUN = 1000  # spaces
# The characters that byte-level BPEs write for bytes: printable Latin-1 as itself, other bytes from 256 on.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTE_OF = dict(zip(map(chr, PRINTABLE), PRINTABLE, strict=True))
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
LONGEST_WORD = 1000  # characters; longer words are cut, since BPE training time grows with the square of their length


class Tokenizer:
    """A tokenizer from a tiktoken encoding whose last token is end-of-text; `encode` never returns it."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.name, self._encoding = encoding.name, encoding
        self.vocabulary_size, self.end_of_text = encoding.n_vocab, encoding.eot_token

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of the text, [tokens]; "<|endoftext|>" in it is ordinary text."""
        try:
            # Into an array: the lists of `encode_ordinary` would cost more than a tenth of the time.
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(without_surrogates(text))
        except ValueError:  # a million spaces before a word exceed the stack of tiktoken's regular expressions
            pieces = cut_at_spaces(text)
            if len(pieces) == 1:
                raise
            return np.concatenate([self.encode(piece) for piece in pieces])
        return tokens.astype(np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode(list(tokens))


def cut_at_spaces(text: str) -> list[str]:
    """Cut a text around long runs of spaces into pieces that give the same tokens as the whole.

    In WORDS the first of several spaces begins a word, which ends before the last one (that may belong to the next
    word) or with the text. So a run without its last space is the same word as when it is the whole text.
    """
    cuts = [0]
    for run in SPACES.finditer(text):
        if len(run[0]) > LONG_RUN:
            cuts += [run.start(), run.end() - (run.end() < len(text))]
    pieces = (text[begin:end] for begin, end in itertools.pairwise([*cuts, len(text)]))
    return [piece for piece in pieces if piece]


def trained_size(name: str) -> int | None:
    """Return N of "bpe_N", or None for the other tokenizers. Raises DataError for an unknown name."""
    if name in ("gpt2", "bytes"):
        return None
    size = re.fullmatch(r"bpe_(\d+)", name)
    if size is None:
        raise DataError(f"tokenizer={name}: expected gpt2, bytes or bpe_N, such as bpe_1024")
    if not 257 < int(size[1]) <= LARGEST_VOCABULARY:
        raise DataError(
            f"tokenizer={name}: expected from 258 (bytes, a merge, end-of-text) to {LARGEST_VOCABULARY} tokens"
        )
    return int(size[1])


def load_tokenizer(name: str, folder: Path, vocabulary: str = "") -> Tokenizer:
    """Load a tokenizer; the vocabulary of a trained one is in the prepared folder.

    vocabulary: checksum of that file, "" if it is not known

    Raises DataError if the name is unknown, or the vocabulary is missing, a different one or cannot be downloaded.
    """
    size = trained_size(name)
    if name == "bytes":
        return from_ranks(name, {bytes([byte]): byte for byte in range(256)}, BYTES)
    if size is None:
        try:
            return Tokenizer(tiktoken.get_encoding("gpt2"))
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a damaged download
            raise DataError(
                f"tokenizer=gpt2: its vocabulary cannot be downloaded ({type(error).__name__}); gpt2/README.md says "
                "where to put its two files; or choose tokenizer=bytes or bpe_N, which need no network"
            ) from error
    file = folder / VOCABULARY
    try:
        content = file.read_bytes()  # tiktoken's own reader would return what it once cached for this path
        pairs = (line.split() for line in content.splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: the vocabulary of tokenizer {name} cannot be read ({error})") from error
    found = hashlib.sha256(content).hexdigest()
    if vocabulary not in ("", found):
        raise DataError(f"{file}: sha256 {found}, expected {vocabulary}, with which the tokens were made; prepare anew")
    if len(ranks) != size - 1:
        raise DataError(f"{file}: {len(ranks)} tokens, expected {size - 1} for tokenizer {name}")
    return from_ranks(name, ranks)


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, as tiktoken does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def train_bpe(name: str, texts: Iterable[str], folder: Path) -> Tokenizer:
    """Train a byte-level BPE named bpe_N from texts, and save its vocabulary in `folder`.

    Raises DataError if the texts do not yield N different tokens.
    """
    import tokenizers
    from tokenizers import Regex, models, pre_tokenizers, trainers

    size = (trained_size(name) or 0) - 1  # without end-of-text
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{LONGEST_WORD}}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(map(without_surrogates, texts), trainer)
    learned = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(learned) < size:
        raise DataError(f"tokenizer={name}: the corpus gives only {len(learned) + 1} tokens; expected at most that")
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): rank for token, rank in learned}
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    write_atomically(folder / VOCABULARY, b"".join(lines))
    return from_ranks(name, ranks)


def from_ranks(name: str, ranks: dict[bytes, int], pattern: str = WORDS) -> Tokenizer:
    """Make a tokenizer with these tokens, followed by end-of-text."""
    special = {END_OF_TEXT: len(ranks)}
    return Tokenizer(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))
