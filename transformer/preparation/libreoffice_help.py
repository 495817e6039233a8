"""LibreOffice's help in two languages, out of Debian's packages: a professional translation in one domain.

Blocks of text correspond if they have the same id in the same page. Kept are pairs of 4 to 60 words on both sides that
were translated, each once. All pairs with the same source text belong to the page that has it first, and the page's
name decides the split: another version of the packages changes little.
"""

import hashlib
from pathlib import Path

from common.packages import Package, debian_package, files_of, html_blocks

CODES = {"en": "en-US", "de": "de", "fr": "fr"}  # LibreOffice's names of languages
SHORTEST, LONGEST = 4, 60  # words
HELD_OUT = {"test": 0.1, "valid": 0.15}  # pages whose hash is below, of 0 to 1
Pair = tuple[str, str]


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
    """Return {page: {id: text}}; of several blocks with one id the first counts."""
    pages: dict[str, dict[str, str]] = {}
    for page, content in files_of(package, f"usr/share/libreoffice/help/{CODES[language]}/text", ".html"):
        blocks = pages.setdefault(page, {})
        for name, text in html_blocks(content):
            if name is not None:
                blocks.setdefault(name, text)
    return pages
