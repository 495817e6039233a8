"""English prose from Debian's packages: essays, the kernel's documentation, the help of an office suite.

A document is a page: its paragraphs of at least 8 words that no earlier page has. Documents are written once to text
files, which preparation then reads.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.atomic import temporary
from common.locks import exclusive
from common.packages import Package, debian_package, files_of, html_blocks

SHORTEST = 8  # words
OTHER_LANGUAGES = "translations/"


@dataclass(frozen=True)
class Source:
    """A package by its names in different releases (the first available is used), its licence and its pages' folder."""

    names: tuple[str, ...]
    licence: str
    under: str


SOURCES = (
    Source(("anarchism",), "GPL-2", "usr/share/doc/anarchism/html"),
    Source(("linux-doc-6.1", "linux-doc-6.12"), "GPL-2", "usr/share/doc/{name}/html"),
    Source(("libreoffice-help-en-us",), "MPL-2.0", "usr/share/libreoffice/help/en-US/text"),
)


def write_prose(archives: Path) -> tuple[Path, list[Package]]:
    """Return the folder of the documents and the packages, made and downloaded unless they are in `archives`.

    Raises UsageError if a package cannot be downloaded.
    """
    packages = [debian_package(source.names, source.licence, archives) for source in SOURCES]
    versions = hashlib.sha256("".join(package.sha256 for package in packages).encode()).hexdigest()[:16]
    folder = archives / f"debian_prose_{versions}"
    with exclusive(archives / f"{folder.name}.lock"):
        if not folder.exists():
            part = temporary(folder, "part")
            try:
                _write(packages, part)
                part.replace(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder, packages


def _write(packages: list[Package], folder: Path) -> None:
    seen: set[str] = set()
    for source, package in zip(SOURCES, packages, strict=True):
        # Under the first name, so that the split does not depend on the release.
        below = folder / source.names[0]
        pages = files_of(package, source.under.format(name=package.name), ".html")
        for page, content in sorted(page for page in pages if not page[0].startswith(OTHER_LANGUAGES)):
            texts = [text for _, text in html_blocks(content, ("p",)) if len(text.split()) >= SHORTEST]
            new = [text for text in dict.fromkeys(texts) if text not in seen]
            seen.update(new)
            if new:
                file = below / f"{page.removesuffix('.html')}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(new) + "\n", encoding="utf-8")
