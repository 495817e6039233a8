"""Downloads that resume where they stopped, and are checked before they get their final name."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.atomic import describe
from common.cli import UsageError, one_line
from common.locks import exclusive

BLOCK = 1 << 20  # bytes
TIMEOUT_S = 60


def fetch(url: str, file: Path, **expected: Any) -> dict[str, Any]:
    """Download a file unless it is there, and return its bytes, sha256 and md5 (None unless it is expected).

    expected: bytes, sha256 and md5 where they are known; the others are missing or None

    Raises UsageError, saying where to put the file by hand, if it cannot be downloaded or is not the expected one. A
    partial download is kept, and the next call resumes it.
    """
    if not file.exists():
        with exclusive(file.with_name(f"{file.name}.lock")):  # several data sets share archives
            if not file.exists():
                partial = file.with_name(f"{file.name}.partial")
                try:
                    _resume(url, partial)
                except OSError as error:  # requests' errors are OSErrors
                    raise UsageError(
                        f"{file.name}: cannot be downloaded from {url} ({one_line(error)}). Call this again to go on, "
                        f"or get the file in another way and put it at {file}"
                    ) from error
                try:
                    seen = check(
                        partial, f"it was removed: call this again, or put the right one at {file}", **expected
                    )
                except UsageError:
                    partial.unlink()
                    raise
                partial.replace(file)
                return seen
    return check(file, f"remove it to download it again from {url}, or put the right one there", **expected)


def check(file: Path, advice: str, **expected: Any) -> dict[str, Any]:
    """Check a file's size and checksums; return what `fetch` returns, or raise UsageError with the advice."""
    seen = {**describe(file), "md5": None}
    if expected.get("md5") is not None:
        with file.open("rb") as stream:
            seen["md5"] = hashlib.file_digest(stream, "md5").hexdigest()
    for name, value in expected.items():
        if value not in (None, seen[name]):
            raise UsageError(
                f"{file}: {name} is {seen[name]}, expected {value}; it is damaged or another file: {advice}"
            )
    return seen


def _resume(url: str, partial: Path) -> None:
    """Download to `partial`, resuming where an earlier call stopped if the server supports it."""
    from pooch import HTTPDownloader  # these take a while to import
    from requests import HTTPError, Response

    with contextlib.closing(partial.open("ab")) as stream:

        def begin(response: Response, **_: object) -> None:
            if response.status_code == 200:  # not 206: all of it, from the beginning
                stream.truncate(0)

        # Not compressed for the transfer: a .tgz must arrive unchanged.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={stream.tell()}-"} if stream.tell() else {})
        with tqdm(desc=partial.stem, total=1, unit="B", unit_scale=True, disable=None) as bar:
            download = HTTPDownloader(bar, BLOCK, headers=headers, hooks={"response": begin}, timeout=TIMEOUT_S)
            try:
                download(url, stream, None)
            except HTTPError as error:
                if error.response.status_code != 416:  # beyond the end: it was complete already
                    raise
