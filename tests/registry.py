"""Packages made up by tests, and stand-ins for apt-get and pip that give them."""

import io
import os
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

# The last argument is the package. With a file `fail` among the packages a download ends in the middle.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
for last; do :; done
[ "$last" = update ] && exit 0
[ -e "{shelf}/fail" ] && echo half > "$last"_half.deb.tmp && echo "E: Unable to locate package $last" >&2 && exit 100
for file in "{shelf}/$last"_*.deb "{shelf}/$(echo "$last" | sed s/==/-/)"-*.whl; do
  if [ -e "$file" ]; then cp "$file" .; exit 0; fi
done
echo "E: Unable to locate package $last" >&2
exit 100
"""


def _tar(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def write_deb(folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0-1") -> Path:
    """Write a small .deb as dpkg-deb does."""
    control = f"Package: {name}\nVersion: {version}\nDescription: made up\n a: b\n".encode()
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": _tar({"control": control}), "data.tar.xz": _tar(files)}
    file = folder / f"{name}_{version}_all.deb"
    with file.open("wb") as stream:
        stream.write(b"!<arch>\n")
        for part, content in parts.items():
            stream.write(f"{part:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
            stream.write(content + b"\n" * (len(content) % 2))
    return file


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write a small wheel."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(zipfile.ZipInfo(path), content)
    return file


class Registry:
    """A folder of packages that `apt-get` and `pip` on the PATH give; `calls` are their command lines so far."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shelf, self._log, programs = folder / "shelf", folder / "log", folder / "bin"
        for each in (self.shelf, programs):
            each.mkdir(parents=True)
        for name in ("apt-get", "pip"):
            (programs / name).write_text(PROGRAM.format(log=self._log, shelf=self.shelf))
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    @property
    def calls(self) -> list[str]:
        """The command lines so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def fail(self, fails: bool) -> None:
        """Let downloads end in the middle, or succeed again."""
        (self.shelf / "fail").touch() if fails else (self.shelf / "fail").unlink()
