"""Conversion between text and subwords: Moses tokenisation (sacremoses) and byte pair encoding (subword-nmt)."""

import re
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from common.config.config import ConfigError
from transformer.preparation.files import read_lines

CODES = "bpe.codes"  # subword-nmt's file in a data folder
VERSION = re.compile(r"#version: \d+(\.\d+)*\s*$")
JOINT = re.compile(r"@@( |$)")  # subword-nmt's mark between the pieces of a word
NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b\ufeff]")


class MosesText:
    """Conversion between raw lines of one language and Moses words separated by spaces.

    As in fairseq's WMT recipes, punctuation is normalised, hyphens are split ("@-@") and special characters escaped.
    """

    def __init__(self, language: str) -> None:
        self._language = language

    @cached_property
    def _tools(self) -> tuple[Any, Any, Any]:
        from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

        lang = self._language
        return MosesPunctNormalizer(lang), MosesTokenizer(lang), MosesDetokenizer(lang)

    def tokenize(self, line: str) -> str:
        """Convert a raw line to words separated by single spaces."""
        normalizer, tokenizer, _ = self._tools
        clean = NOT_PRINTABLE.sub(" ", normalizer.normalize(line))
        return tokenizer.tokenize(clean, aggressive_dash_splits=True, return_str=True)

    def detokenize(self, words: str) -> str:
        """Convert words separated by spaces to plain text."""
        return self._tools[2].detokenize(words.split())


class Subwords:
    """Conversion of words to subwords by codes that subword-nmt has learned.

    Raises ConfigError naming the file, and the line if it is malformed.
    """

    def __init__(self, codes: Path) -> None:
        from subword_nmt.apply_bpe import BPE

        try:
            lines = "\n".join(read_lines(codes)).rstrip("\n").split("\n")
        except OSError as error:
            raise ConfigError(f"{codes}: cannot be read ({error.strerror}); it holds the subword codes") from error
        for number, line in enumerate(lines, start=1):  # subword-nmt would end the process without naming the file
            versioned = number == 1 and line.startswith("#version:")
            if not (VERSION.match(line) if versioned else len(line.strip("\r ").split(" ")) == 2):
                expected = "`#version: N.N`" if versioned else "two subwords and a space"
                raise ConfigError(f"{codes}, line {number}: expected {expected}, found {line!r:.60}")
        self._bpe = BPE(StringIO("\n".join(lines)))

    def split(self, words: str) -> str:
        """Convert words separated by spaces to subwords separated by spaces."""
        return self._bpe.process_line(words).strip()


def join_subwords(subwords: str) -> str:
    """Undo `Subwords.split`."""
    return JOINT.sub("", subwords)
