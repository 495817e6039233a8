"""A data folder: its dictionary, its binarized splits, and the conversion between text and tokens."""

import itertools
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config.config import ConfigError
from transformer.config import Folder, NumberNames
from transformer.data import ParallelText
from transformer.model import PAD
from transformer.preparation import folder
from transformer.preparation.files import read_text
from transformer.search import EOS
from transformer.text import CODES, MosesText, Subwords, join_subwords

UNKNOWN = 3  # fairseq's index of tokens outside the dictionary
RAW = "raw"  # folder of untouched lines: raw/<split>.<language>


def check_folder(data: Folder | NumberNames) -> None:
    """Raise ConfigError if the folder of the texts does not exist."""
    if not Path(data.path).is_dir():
        raise ConfigError(
            f"data.path={data.path}: no such folder; `python -m transformer.prepare --help` says how to make one"
        )


class Corpus:
    """A data folder and its joint dictionary.

    Raises ConfigError if the folder or its dictionary is missing, if it was prepared in another way than configured, or
    if the dictionaries of source and target differ (the model has one embedding matrix).
    """

    def __init__(self, data: Folder | NumberNames) -> None:
        from transformer.fairseq_compat import read_dictionary

        self._data = data
        self.source, self.target = data.source, data.target
        self.folder = Path(data.path)
        check_folder(data)
        check_preparation(data)
        self._dictionary: Any = read_dictionary(self.folder, self.source)
        if read_dictionary(self.folder, self.target).symbols != self._dictionary.symbols:
            raise ConfigError(
                f"data.path={data.path}: dict.{self.source}.txt and dict.{self.target}.txt differ; expected a joint "
                "dictionary (fairseq-preprocess --joined-dictionary)"
            )
        indices = (self._dictionary.pad(), self._dictionary.eos(), self._dictionary.unk())
        if indices != (PAD, EOS, UNKNOWN):
            raise ConfigError(
                f"data.path={data.path}: pad, eos and unk are {indices}, expected fairseq's {(PAD, EOS, UNKNOWN)}"
            )
        folder.check_unchanged(self.folder, (f"dict.{self.source}.txt", f"dict.{self.target}.txt", CODES))

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self._dictionary)

    def split(self, name: str, max_length: int | None = None) -> ParallelText:
        """Open the split `name`: train, valid or test. Raises ConfigError if it holds tokens beyond the dictionary."""
        text = ParallelText(self.folder, name, self.source, self.target, max_length)
        if text.largest_token >= self.vocabulary:
            raise ConfigError(
                f"data.path={self.folder}: split {name} holds token {text.largest_token}, but the dictionary has "
                f"{self.vocabulary}; expected the dictionary with which it was made"
            )
        return text

    def evaluated(self, name: str) -> ParallelText:
        """Open a split to evaluate on: whole lines, but held-out training lines are cut like the others."""
        held_out = name == "valid" and isinstance(self._data, Folder) and self._data.validation == "held_out"
        return self.split(name, self._data.max_length if held_out else None)

    def encode(self, line: str) -> Tensor:
        """Convert a raw source line to tokens with EOS."""
        subwords = self._codes.split(self._source_text.tokenize(line))
        return self._dictionary.encode_line(subwords, add_if_not_exist=False, append_eos=True).long()

    def words(self, tokens: Any) -> str:
        """Convert target tokens, with or without EOS and padding, to Moses words."""
        kept = [int(token) for token in tokens if int(token) not in (PAD, EOS)]
        return join_subwords(" ".join(self._dictionary[token] for token in kept))

    def line(self, tokens: Any) -> str:
        """Convert target tokens to plain text."""
        return self._target_text.detokenize(self.words(tokens))

    def references(self, split: str) -> tuple[list[str], bool]:
        """Return the target lines of a split and whether they are raw; without raw lines they are detokenized."""
        text = self.split(split)
        file = self.folder / RAW / f"{split}.{self.target}"
        if file.is_file():
            lines = list(itertools.islice(read_text(file), len(text) + 1))
            if len(lines) != len(text):
                raise ConfigError(f"data.path={self.folder}: {file} and the binarized split differ in length")
            return lines, True
        return [self.line(text.target_tokens(i)) for i in range(len(text))], False

    @cached_property
    def _codes(self) -> Subwords:
        return Subwords(self.folder / CODES)

    @cached_property
    def _source_text(self) -> MosesText:
        return MosesText(self.source)

    @cached_property
    def _target_text(self) -> MosesText:
        return MosesText(self.target)


def check_preparation(data: Folder | NumberNames) -> None:
    """Raise ConfigError if data.validation or data.cleaning is set and the folder was prepared differently."""
    record = folder.record(Path(data.path))
    found = {} if record is None else record["recipe"]
    for key in ("validation", "cleaning"):
        expected = getattr(data, key, None)
        if expected is not None and found.get(key) != expected:
            has = f"data.{key}={expected}: {data.path} has {found.get(key, 'no record of it')}"
            corpus = {"folder": "files"}.get(data.name, data.name)
            if corpus.startswith("wmt14") or (corpus, key) == ("files", "cleaning"):
                has += f"; another folder: python -m transformer.prepare corpus={corpus} {key}={expected} output=..."
            raise ConfigError(f"{has}; expected what it has, or null")
