"""Reading WMT14's raw line pairs from its archives."""

import gzip
import itertools
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Literal

from common.config.config import ConfigError
from transformer.preparation.manifest import CorpusSource, DataManifest, LanguagePair
from transformer.text import unescape

Pair = tuple[str, str]
SEGMENT = re.compile(r"<seg[^>]*>\s*(.*?)\s*</seg>")


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
    return (unescape(segment[1]) for segment in map(SEGMENT.search, lines) if segment is not None)
