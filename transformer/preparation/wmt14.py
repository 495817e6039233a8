"""WMT14: the manifest wmt14.yaml, which lists its archives, and reading raw line pairs from them."""

import gzip
import html
import itertools
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

from omegaconf import OmegaConf
from pydantic import Field, PositiveInt, model_validator

from common.config.base import Strict
from common.config.config import ConfigError
from common.downloads import fetch

Pair = tuple[str, str]
MANIFEST = Path(__file__).with_name("wmt14.yaml")
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]
SEGMENT = re.compile(r"<seg[^>]*>\s*(.*?)\s*</seg>")


class Archive(Strict):
    """A file to download; sizes and checksums are null where they are not known."""

    url: str
    bytes: PositiveInt | None
    sha256: Hex | None
    md5: Hex | None

    @property
    def file(self) -> str:
        """The file's name in the folder of archives."""
        return self.url.rpartition("/")[2]

    def fetch(self, folder: Path) -> dict[str, Any]:
        """Download the archive unless it is in the folder; return its name and checksums. Raises UsageError."""
        seen = fetch(self.url, folder / self.file, bytes=self.bytes, sha256=self.sha256, md5=self.md5)
        known = self.sha256 is not None or self.md5 is not None
        checked = "as in the manifest" if known else "no checksum is known for this file"
        return {"file": self.file, "url": self.url} | seen | {"checked": checked}


class CorpusSource(NamedTuple):
    """Two members of an archive, the source and the target lines; a list of three words in the manifest."""

    archive: str
    source: str
    target: str


class LanguagePair(Strict):
    """The data set of a language pair: training corpora, newstest2013 and newstest2014."""

    source: str
    target: str
    merges: PositiveInt
    held_out_every: PositiveInt
    train: list[CorpusSource]
    valid: CorpusSource
    test: CorpusSource


class DataManifest(Strict):
    """Archives and the data sets made of them."""

    archives: dict[str, Archive]
    pairs: dict[str, LanguagePair]

    @model_validator(mode="after")
    def _archives_exist(self) -> "DataManifest":
        for pair in self.pairs.values():
            for corpus in (*pair.train, pair.valid, pair.test):
                if corpus.archive not in self.archives:
                    raise ValueError(f"archive {corpus.archive!r} is not in the list of archives")
        return self


@cache
def read_manifest(file: Path = MANIFEST) -> DataManifest:
    """Read and check the manifest."""
    return DataManifest.model_validate(OmegaConf.to_container(OmegaConf.load(file)))


def wmt14_pairs(
    manifest: DataManifest, pair: LanguagePair, folder: Path, validation: Literal["newstest2013", "held_out"]
) -> dict[str, Iterator[Pair]]:
    """Return the raw line pairs of each split, read from the archives in `folder`."""

    def train() -> Iterator[Pair]:
        return itertools.chain.from_iterable(corpus_pairs(manifest, corpus, folder) for corpus in pair.train)

    test = corpus_pairs(manifest, pair.test, folder)
    if validation == "newstest2013":
        return {"train": train(), "valid": corpus_pairs(manifest, pair.valid, folder), "test": test}
    every = pair.held_out_every
    return {"train": slice_out(train(), every, False), "valid": slice_out(train(), every, True), "test": test}


def slice_out(pairs: Iterable[Pair], every: int, held_out: bool) -> Iterator[Pair]:
    """Return every `every`-th pair if held_out, else all others."""
    return (pair for number, pair in enumerate(pairs, start=1) if (number % every == 0) == held_out)


def corpus_pairs(manifest: DataManifest, corpus: CorpusSource, folder: Path) -> Iterator[Pair]:
    """Yield the line pairs of a corpus. Raises ConfigError if a member is missing or its sides differ in length."""
    file = folder / manifest.archives[corpus.archive].file
    with ExitStack() as stack:
        # Each side opens the archive separately, since members of one open archive cannot be read in parallel.
        sides = [member_lines(stack, file, member) for member in (corpus.source, corpus.target)]
        for source, target in itertools.zip_longest(*sides):
            if source is None or target is None:
                raise ConfigError(f"{file}: {corpus.source} and {corpus.target} have different numbers of lines")
            yield source, target


def member_lines(stack: ExitStack, file: Path, member: str) -> Iterator[str]:
    """Read the lines of a text, .gz or .sgm member of a tar archive."""
    try:
        archive = stack.enter_context(tarfile.open(file))  # noqa: SIM115 - the stack closes it
        stream = archive.extractfile(member)
    except KeyError as error:
        raise ConfigError(f"{file}: has no member {member}") from error
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error
    if stream is None:
        raise ConfigError(f"{file}: {member} is no file")
    content: IO[bytes] = stack.enter_context(gzip.GzipFile(fileobj=stream) if member.endswith(".gz") else stream)
    # A binary stream is split at line feeds only; some texts hold other separators, which are part of a line.
    lines = (line.decode("utf-8", errors="replace").strip("\r\n") for line in content)
    if not member.endswith(".sgm"):
        return lines
    return (html.unescape(segment[1]) for segment in map(SEGMENT.search, lines) if segment is not None)
