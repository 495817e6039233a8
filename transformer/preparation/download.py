"""Downloads that resume where they stopped and are checked against the manifest."""

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.locks import exclusive
from common.training.config import ConfigError
from transformer.preparation.files import BLOCK, digest
from transformer.preparation.manifest import Archive

TIMEOUT_S = 60


def fetch(archive: Archive, folder: Path) -> dict[str, Any]:
    """Make sure that the complete archive is in the folder, and return its name and checksum.

    An existing file is only checked. Raises ConfigError, saying where to put the file by hand, if it can be neither
    found nor downloaded, or if it is not the one that the manifest describes.
    """
    file = folder / archive.file
    if not file.exists():
        with exclusive(folder / f"{archive.file}.lock"):  # several data sets share archives
            if not file.exists():
                download_to(archive, file)
    return {"file": archive.file, "url": archive.url} | check(archive, file)


def download_to(archive: Archive, file: Path) -> None:
    """Download an archive. Raises ConfigError, saying where to put the file by hand, if that fails."""
    partial = file.with_name(f"{archive.file}.partial")
    try:
        download(archive.url, partial)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        raise ConfigError(
            f"{archive.file}: cannot be downloaded from {archive.url} ({error}). Call this again to go on, or get "
            f"the file in another way and put it at {file}"
        ) from error
    partial.replace(file)


def download(url: str, partial: Path) -> None:
    """Download to `partial`, resuming where an earlier call stopped if the server supports it."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # it was complete already
        raise
    with response:
        continued = response.status == http.HTTPStatus.PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        begin = have if continued else 0
        total = begin + int(length) if length else None
        bar = tqdm(desc=partial.stem, total=total, initial=begin, unit="B", unit_scale=True, disable=None)
        with partial.open("ab" if continued else "wb") as stream, bar:
            while block := response.read(BLOCK):
                stream.write(block)
                bar.update(len(block))
    if total is not None and partial.stat().st_size != total:
        raise OSError(f"the connection ended after {partial.stat().st_size} of {total} bytes")


def check(archive: Archive, file: Path) -> dict[str, Any]:
    """Compare size and checksums with the manifest, and return them with a note whether a checksum was known.

    Raises ConfigError if they differ.
    """
    seen = {"bytes": file.stat().st_size, "sha256": digest(file), "md5": None}
    if archive.md5 is not None:
        seen["md5"] = digest(file, "md5")
    for name in ("bytes", "sha256", "md5"):
        expected = getattr(archive, name)
        if expected is not None and seen[name] != expected:
            raise ConfigError(
                f"{file}: {name} is {seen[name]}, expected {expected}; it is damaged or another file: remove it to "
                f"download it from {archive.url}, or put the right one there"
            )
    known = archive.sha256 is not None or archive.md5 is not None
    return seen | {"checked": "as in the manifest" if known else "no checksum is known for this file"}
