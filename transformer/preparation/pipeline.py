"""The stages from raw lines to subwords. Each works on chunks of lines in parallel, and is done once: what lies
finished in the work folder is not made again.

    tokenized/<split>.<chunk>.tsv   source and target words (Moses); raw lines behind them but for training
    bpe.codes                       learned on both sides of the training text together
    encoded/<split>.<chunk>.tsv     the same in subwords, cleaned by length and ratio
    texts/<split>.<language>        all chunks together, what fairseq binarizes
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path

from common.training.config import ConfigError
from transformer.preparation.files import read_lines, whole, write_lines
from transformer.preparation.parallel import results, run
from transformer.text import CODES, MosesText, Subwords

SPLITS = ("train", "valid", "test")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Recipe:
    """How raw lines become subwords.

    merges: of the joint byte pair encoding. longest: subwords on the longer side of a pair; max_ratio: of the longer
    to the shorter side. cleaned: the splits that lose pairs which are longer or more uneven than that, or empty.
    chunk: lines in a chunk.
    """

    source: str
    target: str
    merges: int
    longest: int = 250
    max_ratio: float = 1.5
    cleaned: tuple[str, ...] = ("train",)
    chunk: int = 20_000

    def keeps(self, source: str, target: str) -> bool:
        """Whether cleaning keeps a pair of subword lines."""
        shorter, longer = sorted((len(source.split()), len(target.split())))
        return shorter > 0 and longer <= min(self.longest, self.max_ratio * shorter)


@dataclass(frozen=True)
class Stages:
    """A recipe at work in a folder, with so many processes."""

    recipe: Recipe
    work: Path
    jobs: int

    def tokenize(self, split: str, pairs: Iterable[Pair]) -> None:
        """Stage 1: raw pairs to words."""
        done = self.work / "tokenized" / f"{split}.done"
        if done.exists():
            return
        files = (self._folder("tokenized") / f"{split}.{number:06d}.tsv" for number in range(10**6))
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
        """Stage 2: the joint byte pair encoding; returns its file."""
        codes = self.work / CODES
        if not codes.exists():
            words: Counter[str] = Counter()
            files = [(file,) for file in self._files("tokenized", "train")]
            for counts in results(count_words, files, self.jobs, "count words"):
                words.update(counts)
            learn_codes(words, self.recipe.merges, codes)
        return codes

    def encode(self) -> None:
        """Stage 3: words to subwords, and cleaning."""
        todo = [
            (self.recipe, self.work / CODES, split in self.recipe.cleaned, file, self._folder("encoded") / file.name)
            for split in SPLITS
            for file in self._files("tokenized", split)
        ]
        run(encode_chunk, [each for each in todo if not each[-1].exists()], self.jobs, "encode")

    def join(self, raw: Path) -> dict[str, int]:
        """Stage 4: texts/, and the raw lines of the held-out splits into `raw`; returns the pairs of each split."""
        counts = {}
        for split in SPLITS:
            files = self._files("encoded", split)
            for column, language in enumerate((self.recipe.source, self.recipe.target)):
                write_lines(self._folder("texts") / f"{split}.{language}", column_of(files, column))
                if split != "train":
                    write_lines(raw / f"{split}.{language}", column_of(files, 2 + column))
            counts[split] = sum(1 for _ in column_of(files, 0))
            if not counts[split]:
                raise ConfigError(f"split {split}: expected at least one pair of lines, got none after cleaning")
        return counts

    def _folder(self, stage: str) -> Path:
        return self.work / stage

    def _files(self, stage: str, split: str) -> list[Path]:
        return sorted(self._folder(stage).glob(f"{split}.*.tsv"))


def chunks(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    """Lists of `size` pairs; the last may be shorter."""
    iterator = iter(pairs)
    while chunk := list(islice(iterator, size)):
        yield chunk


def tokenize_chunk(recipe: Recipe, keep_raw: bool, pairs: list[Pair], file: Path) -> None:
    """Write a chunk of words, with the raw lines behind them if they are kept."""
    source, target = MosesText(recipe.source), MosesText(recipe.target)
    words = [(source.tokenize(s), target.tokenize(t)) for s, t in pairs]
    rows = [(*w, *p) for w, p in zip(words, pairs, strict=True)] if keep_raw else words
    write_lines(file, ("\t".join(" ".join(cell.split("\t")) for cell in row) for row in rows))


def count_words(file: Path) -> Counter[str]:
    """How often each word of either side occurs in a chunk."""
    counts: Counter[str] = Counter()
    for row in read_rows(file):
        for words in row[:2]:
            counts.update(words.split())
    return counts


def learn_codes(words: Counter[str], merges: int, codes: Path) -> None:
    """Learn a byte pair encoding from counted words with subword-nmt."""
    try:
        from subword_nmt.learn_bpe import learn_bpe
    except ImportError as error:
        raise ConfigError(f"subword-nmt cannot be imported ({error}); pip install '.[transformer]'") from error
    # Sorted, so that ties are broken alike whatever the order of the chunks.
    lines = [f"{word} {count}" for word, count in sorted(words.items())]
    with whole(codes) as partial, partial.open("w", encoding="utf-8") as stream, redirect_stderr(StringIO()):
        learn_bpe(lines, stream, merges, is_dict=True)


def encode_chunk(recipe: Recipe, codes: Path, clean: bool, words: Path, file: Path) -> None:
    """Write a chunk of subwords, without the pairs that cleaning drops."""
    subwords = subwords_of(codes)
    rows = ([subwords.split(source), subwords.split(target), *raw] for source, target, *raw in read_rows(words))
    write_lines(file, ("\t".join(row) for row in rows if not clean or recipe.keeps(*row[:2])))


@cache
def subwords_of(codes: Path) -> Subwords:
    """The codes, read once in each process; they remember the words that they have split."""
    return Subwords(codes)


def read_rows(file: Path) -> Iterator[list[str]]:
    """The cells of each line."""
    return (line.split("\t") for line in read_lines(file))


def column_of(files: Iterable[Path], column: int) -> Iterator[str]:
    """One cell of each line of these files, one after another."""
    return (row[column] for file in files for row in read_rows(file))
