"""Finding the files of documents: on this machine, on the Hugging Face hub, or in Python's standard library."""

import glob
import logging
import os
import sysconfig
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2.token_files import DataError

OPENWEBTEXT = "Skylion007/openwebtext"  # the copy in parquet; the original loading script no longer works
STDLIB = "python_stdlib"
KINDS: dict[str, Literal["parquet", "jsonl", "text"]] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".txt": "text",
    ".py": "text",
}
# Left out: tests, tables of data, and packages that pip installed.
SHOWN = 5  # files that are left out, in a warning
STDLIB_WITHOUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class InputFile:
    """A file of documents.

    name:     name in the list of inputs, independent of the files' location
    location: a path, or a URL that fsspec opens (hf://...)
    sha256:   checksum, if it is known without reading the file
    """

    name: str
    location: str
    kind: Literal["parquet", "jsonl", "text"]
    bytes: int
    sha256: str | None = None


def find_inputs(source: str, revision: str = "main", streaming: bool = False) -> list[InputFile]:
    """List the files of a source, sorted by name.

    source:    python_stdlib, openwebtext, hub:OWNER/NAME, or a file, folder or glob
    revision:  on the hub
    streaming: read the hub's files over the network and keep nothing on disk

    Raises DataError if there are none.
    """
    if source == STDLIB:
        return stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    if source == "openwebtext" or source.startswith("hub:"):
        repository = OPENWEBTEXT if source == "openwebtext" else source.removeprefix("hub:")
        return hub_files(repository, revision, streaming)
    return local_files(source)


def stdlib_files(folder: Path) -> list[InputFile]:
    """List the sources of Python's standard library."""
    kept = []
    for root, folders, names in os.walk(folder):
        folders[:] = set(folders) - STDLIB_WITHOUT  # not even walked: packages hold many files
        kept += [(Path(root) / name).relative_to(folder) for name in names if name.endswith(".py")]
    if not kept:
        raise DataError(f"source={STDLIB}: {folder} holds no .py files; expected Python's own sources")
    return [_local(folder / path, path.as_posix()) for path in sorted(kept)]


def local_files(source: str) -> list[InputFile]:
    """List files of a known kind: a single one, all below a folder, or all that match a glob.

    Links are followed. What is left out (hidden or of another kind) is named in a warning.
    """
    path = Path(source)
    if path.is_file():
        if _kind(path) is None:
            raise DataError(f"source={source}: expected a file whose name ends with one of {', '.join(KINDS)}")
        return [_local(path, path.name)]
    found, left_out = _below(path) if path.is_dir() else _matching(source)
    files = sorted(file for file in found if _kind(file) is not None)
    if not files:
        raise DataError(
            f"source={source}: no {', '.join(KINDS)} files there; expected openwebtext, {STDLIB}, hub:OWNER/NAME, or "
            "a file, folder or glob"
        )
    left_out += sorted(str(file) for file in found if _kind(file) is None)
    if left_out:
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        logging.warning("source=%s: left out are %s%s", source, ", ".join(left_out[:SHOWN]), more)
    common = path if path.is_dir() else os.path.commonpath([file.parent for file in files])
    return [_local(file, file.relative_to(common).as_posix()) for file in files]


def hub_files(repository: str, revision: str, streaming: bool) -> list[InputFile]:
    """List the parquet files of a data set on the hub, at the commit to which `revision` points now."""
    from huggingface_hub import HfApi, snapshot_download

    source = f"{repository} at revision={revision}"
    try:
        api = HfApi()
        commit = api.dataset_info(repository, revision=revision).sha
        tree = api.list_repo_tree(repository, repo_type="dataset", revision=commit, recursive=True)
        files = sorted((f for f in tree if f.path.endswith(".parquet")), key=lambda f: f.path)
        if files and not streaming:
            folder = snapshot_download(
                repository, repo_type="dataset", revision=commit, allow_patterns=[f.path for f in files]
            )
    except Exception as error:  # the hub's errors, and those of whichever HTTP client its library uses
        raise DataError(
            f"{source} cannot be reached on the hub ({one_line(error)}); where there is no network give the "
            "folder that holds the parquet files: source=FOLDER"
        ) from error
    if not files:
        raise DataError(f"{source} holds no parquet files; the hub's own conversion is revision=refs/convert/parquet")
    if streaming:
        base = f"hf://datasets/{repository}@{commit}"
        return [
            InputFile(f.path, f"{base}/{f.path}", "parquet", f.size, f.lfs.sha256 if f.lfs else None) for f in files
        ]
    return [_local(Path(folder) / f.path, f.path) for f in files]


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, cut to a readable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."


def _below(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all files below a folder, and the hidden ones; a folder to which several links lead is entered once."""
    files, hidden, entered, tops = [], [], set(), deque([str(folder)])
    while tops:
        for root, folders, names in os.walk(tops.popleft()):
            if (real := os.path.realpath(root)) in entered:
                folders.clear()
                continue
            entered.add(real)
            hidden += [os.path.join(root, name) for name in sorted(folders + names) if name.startswith(".")]
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            # Later: files have the names under which they lie, if they lie below the folder too.
            tops += [path for path in (os.path.join(root, name) for name in folders) if os.path.islink(path)]
            files += [Path(root) / name for name in names if not name.startswith(".")]
    return [file for file in files if file.is_file()], hidden


def _matching(pattern: str) -> tuple[list[Path], list[str]]:
    """Return the files that match a glob, each once however many links lead to its folder, and the folders that do."""
    matches = glob.glob(pattern, recursive=True)
    files = [Path(path) for path in matches if os.path.isfile(path)]
    # Those without a link come first, then those with the fewest.
    files.sort(key=lambda file: (os.path.realpath(file.parent) != os.path.abspath(file.parent), len(file.parts), file))
    unique = {(os.path.realpath(file.parent), file.name): file for file in reversed(files)}
    return list(unique.values()), [] if "**" in pattern else sorted(path for path in matches if os.path.isdir(path))


def _kind(path: Path) -> Literal["parquet", "jsonl", "text"] | None:
    return KINDS.get(path.suffix.lower())


def _local(path: Path, name: str) -> InputFile:
    return InputFile(name, str(path), KINDS[path.suffix.lower()], path.stat().st_size)
