"""The stages from raw lines to subwords.

Each stage works on chunks of lines in parallel, and reuses what is already finished in the work folder:

    tokenized/<split>.<chunk>.tsv   source and target words (Moses), followed by the raw lines except in training
    bpe.codes                       learned on both sides of the training text together
    encoded/<split>.<chunk>.tsv     the same in subwords, cleaned by length and ratio
    texts/<split>.<language>        all chunks together, for fairseq to binarize
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.atomic import write_atomically
from common.config.config import ConfigError
from common.interruptible import in_processes
from transformer.preparation.files import digest, read_lines, write_lines
from transformer.text import CODES, MosesText, Subwords

SPLITS = ("train", "valid", "test")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Recipe:
    """How raw lines become subwords.

    merges:    of the joint byte pair encoding
    cleaned:   splits from which pairs with an empty side and pairs beyond the next two limits are dropped
    longest:   most subwords on the longer side of a pair
    max_ratio: largest ratio of the longer to the shorter side
    chunk:     lines in a chunk
    """

    source: str
    target: str
    merges: int
    cleaned: tuple[str, ...] = ("train",)
    longest: float = math.inf
    max_ratio: float = math.inf
    chunk: int = 20_000

    def keeps(self, source: str, target: str) -> bool:
        """Decide whether cleaning keeps a pair of subword lines."""
        shorter, longer = sorted((len(source.split()), len(target.split())))
        return shorter > 0 and longer <= min(self.longest, self.max_ratio * shorter)


@dataclass(frozen=True)
class Stages:
    """The stages of a recipe in the folder `work`, with `jobs` processes."""

    recipe: Recipe
    work: Path
    jobs: int

    def tokenize(self, split: str, pairs: Iterable[Pair]) -> None:
        """Convert raw pairs to words (stage 1)."""
        done = self.work / "tokenized" / f"{split}.done"
        if done.exists():
            return
        files = (self.work / "tokenized" / f"{split}.{number:06d}.tsv" for number in range(10**6))
        todo = (
            (self.recipe, split != "train", chunk, file)
            for chunk, file in zip(chunks(pairs, self.recipe.chunk), files, strict=False)
            if not file.exists()
        )
        run(tokenize_chunk, todo, self.jobs, f"tokenize {split}")
        if not self._files("tokenized", split):
            raise ConfigError(f"split {split}: expected at least one pair of lines, got none")
        write_lines(done, [])

    def learn(self) -> Path:
        """Learn the joint byte pair encoding (stage 2) and return its file."""
        codes = self.work / CODES
        if not codes.exists():
            words: Counter[str] = Counter()
            for file in tqdm(self._files("tokenized", "train"), "count words", unit="chunk", disable=None):
                for source, target in read_rows(file):
                    words.update(source.split())
                    words.update(target.split())
            learn_codes(words, self.recipe.merges, codes)
        return codes

    def encode(self) -> None:
        """Convert words to subwords and clean them (stage 3)."""
        todo = [
            (self.recipe, self.work / CODES, split in self.recipe.cleaned, file, self.work / "encoded" / file.name)
            for split in SPLITS
            for file in self._files("tokenized", split)
        ]
        run(encode_chunk, [each for each in todo if not each[-1].exists()], self.jobs, "encode")

    def join(self, raw: Path) -> dict[str, int]:
        """Join chunks to texts/ and raw held-out lines to `raw` (stage 4); return the number of pairs of each split."""
        counts = {}
        for split in SPLITS:
            files = self._files("encoded", split)
            for column, language in enumerate((self.recipe.source, self.recipe.target)):
                write_lines(self.work / "texts" / f"{split}.{language}", column_of(files, column))
                if split != "train":
                    write_lines(raw / f"{split}.{language}", column_of(files, 2 + column))
            counts[split] = sum(1 for _ in column_of(files, 0))
            if not counts[split]:
                raise ConfigError(f"split {split}: expected at least one pair of lines, got none after cleaning")
        return counts

    def _files(self, stage: str, split: str) -> list[Path]:
        return sorted((self.work / stage).glob(f"{split}.*.tsv"))


def run(function: Callable[..., None], arguments: Iterable[tuple[Any, ...]], jobs: int, title: str) -> None:
    """Call function(*a) for each a of `arguments`; in this process if jobs is 1.

    The first error is raised, KilledError if a process is killed, and no further job is started.
    """
    here = (function(*each) for each in arguments)
    with closing(here if jobs == 1 else in_processes(function, arguments, jobs, 2 * jobs, "jobs")) as calls:
        for _ in tqdm(calls, title, unit="chunk", disable=None):
            pass


def chunks(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    """Yield lists of `size` pairs; the last may be shorter."""
    iterator = iter(pairs)
    while chunk := list(islice(iterator, size)):
        yield chunk


def tokenize_chunk(recipe: Recipe, keep_raw: bool, pairs: list[Pair], file: Path) -> None:
    """Write a chunk of words, followed by the raw lines if they are kept."""
    source, target = MosesText(recipe.source), MosesText(recipe.target)
    words = [(source.tokenize(s), target.tokenize(t)) for s, t in pairs]
    rows = [(*w, *p) for w, p in zip(words, pairs, strict=True)] if keep_raw else words
    write_lines(file, ("\t".join(" ".join(cell.split("\t")) for cell in row) for row in rows))


def learn_codes(words: Counter[str], merges: int, codes: Path) -> None:
    """Learn a byte pair encoding from word counts with subword-nmt."""
    from subword_nmt.learn_bpe import learn_bpe

    if not any(len(word) > 1 for word in words):
        raise ConfigError("split train: expected words of at least two characters to learn subwords from, got none")
    # Sorted, so that ties do not depend on the order of the chunks.
    lines = [f"{word} {count}" for word, count in sorted(words.items())]
    with StringIO() as learned, redirect_stderr(StringIO()):
        learn_bpe(lines, learned, merges, is_dict=True)
        write_atomically(codes, learned.getvalue().encode())


def encode_chunk(recipe: Recipe, codes: Path, clean: bool, words: Path, file: Path) -> None:
    """Write a chunk of subwords, without the pairs that cleaning drops."""
    subwords = subwords_of(codes, digest(codes))
    rows = ([subwords.split(source), subwords.split(target), *raw] for source, target, *raw in read_rows(words))
    write_lines(file, ("\t".join(row) for row in rows if not clean or recipe.keeps(*row[:2])))


@cache
def subwords_of(codes: Path, sha256: str) -> Subwords:
    """Return the codes with this checksum, read once in each process; they cache the words that they have split."""
    return Subwords(codes)


def read_rows(file: Path) -> Iterator[list[str]]:
    """Yield the cells of each line."""
    return (line.split("\t") for line in read_lines(file))


def column_of(files: Iterable[Path], column: int) -> Iterator[str]:
    """Yield one column of these files, line by line."""
    return (row[column] for file in files for row in read_rows(file))
