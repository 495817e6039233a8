"""The corpora from packages: names of numbers by num2words, and LibreOffice's help, a professional translation.

number names:     A line holds a few numbers ("twelve; three hundred and five"): real language in any amount, with known
                  translations. Word order differs ("vierundzwanzig" is "four and twenty"), so attention is needed, and
                  a model that has learned the task scores close to 100 BLEU.
LibreOffice help: Blocks of text correspond if they have the same id on the same page. Translated pairs of 4 to 60 words
                  on both sides are kept, each once. All pairs with the same source text belong to the first page that
                  has it, and the page's name decides the split: another version of the packages changes little.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.config.config import ConfigError
from common.packages import Package, debian_package, files_of, html_blocks
from transformer.config import NumberNames

SEPARATORS = {"fr": " ; "}  # French has a space before a semicolon
CODES = {"en": "en-US", "de": "de", "fr": "fr"}  # LibreOffice's names of languages
SHORTEST, LONGEST = 4, 60  # words
HELD_OUT = {"test": 0.1, "valid": 0.15}  # pages whose hash, from 0 to 1, is below this
Pair = tuple[str, str]


def number_name_pairs(data: NumberNames) -> dict[str, Iterator[Pair]]:
    """Return the raw line pairs of each split; every number below data.numbers belongs to only one split."""
    numbers = np.random.default_rng(data.seed).permutation(data.numbers)
    held_out = data.held_out
    shares = {"valid": numbers[:held_out], "test": numbers[held_out : 2 * held_out], "train": numbers[2 * held_out :]}
    lines = {"train": data.train_lines, "valid": data.held_out_lines, "test": data.held_out_lines}
    return {split: _pairs(data, shares[split], lines[split], seed) for seed, split in enumerate(lines)}


def name_line(numbers: list[int], language: str) -> str:
    """Write numbers as a line of names. Raises ConfigError if num2words does not know the language."""
    from num2words import num2words

    try:
        return SEPARATORS.get(language, "; ").join(num2words(number, lang=language) for number in numbers)
    except NotImplementedError as error:
        raise ConfigError(f"data: num2words does not know the language {language!r}") from error


def _pairs(data: NumberNames, numbers: np.ndarray, lines: int, split: int) -> Iterator[Pair]:
    generator = np.random.default_rng((data.seed, split))
    for count in generator.integers(1, data.longest, size=lines, endpoint=True):
        chosen = generator.choice(numbers, count).tolist()
        yield name_line(chosen, data.source), name_line(chosen, data.target)


def help_packages(source: str, target: str, folder: Path) -> list[Package]:
    """Return the packages of both languages, downloaded to the folder if they are not there."""
    names = [f"libreoffice-help-{CODES[language].lower()}" for language in (source, target)]
    return [debian_package([name], "MPL-2.0", folder) for name in names]


def help_pairs(source: str, target: str, packages: list[Package]) -> dict[str, list[Pair]]:
    """Return the unique pairs of each split."""
    sides = [_blocks(package, language) for package, language in zip(packages, (source, target), strict=True)]
    split_of: dict[str, str] = {}
    pairs: dict[Pair, None] = {}
    for page, blocks in sorted(sides[0].items()):
        for name, text in blocks.items():
            pair = text, sides[1].get(page, {}).get(name, text)
            if pair[0] != pair[1] and all(SHORTEST <= len(side.split()) <= LONGEST for side in pair):
                split_of.setdefault(text, split_of_page(page))
                pairs[pair] = None
    return {split: [pair for pair in pairs if split_of[pair[0]] == split] for split in ("train", "valid", "test")}


def split_of_page(page: str) -> str:
    """Return the split to which a page belongs."""
    place = int(hashlib.sha256(page.encode()).hexdigest()[:8], 16) / 2**32
    return next((split for split, below in HELD_OUT.items() if place < below), "train")


def _blocks(package: Package, language: str) -> dict[str, dict[str, str]]:
    """Return {page: {id: text}}; of several blocks with the same id, the first counts."""
    pages: dict[str, dict[str, str]] = {}
    for page, content in files_of(package, f"usr/share/libreoffice/help/{CODES[language]}/text", ".html"):
        blocks = pages.setdefault(page, {})
        for name, text in html_blocks(content):
            if name is not None:
                blocks.setdefault(name, text)
    return pages
