"""fairseq under current versions of Python; everything that reads or writes its data format uses this module.

fairseq 0.12.2 is the last release and no longer maintained. It is used for its data format (dictionaries and
memory-mapped `.bin`/`.idx` files), so that data made by `fairseq-preprocess` can be trained on, and by tests that
compare model, loss and search with it. Training itself runs none of its code.

Importing this module imports fairseq. Python 3.11 rejects dataclass defaults that cannot be hashed, so fairseq's
dataclasses are given a hash on import. fairseq's own console scripts lack this fix: use transformer.prepare instead.

Raises FairseqMissing if fairseq is not installed.
"""

import contextlib
import copy
import dataclasses
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hydra.experimental
import numpy as np
import torch
from hydra.core.config_store import ConfigStore

from common.config.config import ConfigError
from common.interruptible import in_processes

INSTALL = "pip install bitarray cffi regex sacrebleu; pip install --no-deps fairseq==0.12.2 (needs a C++ compiler)"


class FairseqMissing(ConfigError, ImportError):  # noqa: N818 - describes the installation
    """Raised if fairseq cannot be imported; the message says why and how to install it."""


@contextlib.contextmanager
def hashable_dataclasses(package: str) -> Iterator[None]:
    """Make dataclasses that the package defines inside the block hashable, so that they may be defaults of others."""
    original = dataclasses.dataclass

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        def decorate(decorated: type) -> type:
            own = decorated.__module__.partition(".")[0] == package
            return original(decorated, **({"unsafe_hash": True} if own else {}) | options)

        return decorate if cls is None else decorate(cls)

    dataclasses.dataclass = dataclass  # type: ignore[assignment]
    try:
        yield
    finally:
        dataclasses.dataclass = original


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress messages inside the block and restore the root logger, which fairseq configures on import."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Hide GPUs from fairseq, which counts them on import: without NVML that starts CUDA, which breaks later forks."""
    count = torch.cuda.device_count
    torch.cuda.device_count = lambda: 0
    try:
        yield
    finally:
        torch.cuda.device_count = count


@contextlib.contextmanager
def own_configs() -> Iterator[None]:
    """Restore Hydra's store: otherwise our configuration would use fairseq's entries as schemas (optimizer/adam)."""
    store = ConfigStore.instance()
    before = copy.deepcopy(store.repo)
    try:
        yield
    finally:
        store.repo = before


def _import() -> tuple[ModuleType, ModuleType]:
    for name in ("compose", "initialize"):  # fairseq imports them from there; Hydra 1.4 has neither there
        vars(hydra.experimental).setdefault(name, getattr(hydra, name))
    try:
        with quiet(), own_configs(), gpus_hidden(), hashable_dataclasses("fairseq"):
            import fairseq.options
            from fairseq_cli import preprocess
    except ImportError as error:
        raise FairseqMissing(f"fairseq cannot be imported ({error}); `make env` installs it, or: {INSTALL}") from error
    return fairseq, preprocess


fairseq, _preprocess = _import()
Dictionary = fairseq.data.Dictionary
TokenData = fairseq.data.indexed_dataset.MMapIndexedDataset
INDEX_MAGIC = TokenData.Index._HDR_MAGIC
TOKEN_TYPES = fairseq.data.indexed_dataset._code_to_dtype


class _Pool:
    """The part of `multiprocessing.Pool` that fairseq needs; the original would wait forever for a killed process."""

    def __init__(self, processes: int) -> None:
        self._processes, self._calls, self._results = processes, [], []

    def apply_async(self, function: Callable[..., Any], args: tuple, kwds: Mapping[str, Any] | None = None) -> Any:
        """Record a call; the returned object's `get()` gives its result after `join`."""
        number = len(self._calls)
        self._calls.append((partial(function, **(kwds or {})), *args))
        return SimpleNamespace(get=lambda: self._results[number])

    def close(self) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Make all calls. Raises KilledError if a process is killed."""
        self._results = list(in_processes(_call, self._calls, self._processes, len(self._calls), "jobs"))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


fairseq.binarizer.Pool = fairseq.data.dictionary.Pool = _Pool


class _Builder(fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder):
    def finalize(self, index_file: str) -> None:
        # Lengths of merged files have 32 bits: under NumPy 2 positions beyond 2 GiB would overflow (fairseq #5532).
        self._sizes = [int(size) for size in self._sizes]
        super().finalize(index_file)


fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder = _Builder


def read_dictionary(folder: Path, language: str) -> Any:
    """Read dict.<language>.txt of a folder. Raises ConfigError if it is missing or not a dictionary."""
    file = folder / f"dict.{language}.txt"
    try:
        return Dictionary.load(str(file))
    except Exception as error:  # also a plain Exception, if it is not UTF-8
        raise ConfigError(f"data.path={folder}: {file.name} cannot be read ({error})") from error


def read_tokens(folder: Path, split: str, pair: str, language: str) -> Any:
    """Open one side of a split, memory-mapped: `len`, `.sizes`, and `[i]` for tokens with EOS.

    pair: source and target language as in file names, "en-de"

    Raises ConfigError if its files are missing or in another format.
    """
    prefix = folder / f"{split}.{pair}.{language}"
    for suffix in (".idx", ".bin"):
        if not prefix.with_name(prefix.name + suffix).is_file():
            raise ConfigError(f"data.path={folder}: {prefix.name}{suffix} is missing")
    try:
        check_format(*(prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin")))
        return TokenData(str(prefix))
    except Exception as error:  # its reader may fail in any way on a foreign file
        raise ConfigError(f"data.path={folder}: {prefix.name} is not fairseq's mmap format ({error})") from error


def check_format(index: Path, tokens: Path) -> None:
    """Raise ValueError unless two files are whole and in mmap format; fairseq's reader would fail in its destructor."""
    with index.open("rb") as stream:
        if stream.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise ValueError(f"{index.name} does not begin as one")
        _, code, sentences = struct.unpack("<QBQ", stream.read(17))  # version, type of the tokens
        lengths = np.fromfile(stream, np.int32, sentences)
        positions = np.fromfile(stream, np.int64, sentences)
    ends = np.cumsum(lengths, dtype=np.int64) * TOKEN_TYPES[code]().itemsize
    expected = {
        index: len(INDEX_MAGIC) + 17 + 12 * sentences,  # a length and a position for each
        tokens: int(ends[-1]) if sentences else 0,
    }
    for file, size in expected.items():
        if file.stat().st_size != size:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes, expected {size}")
    if not np.array_equal(positions[1:], ends[:-1]):
        raise ValueError(
            f"{index.name} has wrong positions, as older versions wrote beyond 2 GiB: remove the folder and prepare it "
            "again"
        )


def largest_token(tokens: Any) -> int:
    """Return the largest token of one side of a split."""
    return int(np.frombuffer(tokens._bin_buffer, tokens._index.dtype).max(initial=0))


def binarize(texts: Path, folder: Path, source: str, target: str, jobs: int, dictionary: Path | None = None) -> None:
    """Run `fairseq-preprocess` on texts/{train,valid,test}.{source,target}, which hold tokens separated by spaces.

    Writes all splits and a joint dictionary (or the given one) into `folder`.
    """
    arguments = ["--source-lang", source, "--target-lang", target, "--joined-dictionary", "--workers", str(jobs)]
    arguments += ["--destdir", str(folder), "--dataset-impl", "mmap"]
    arguments += ["--srcdict", str(dictionary)] if dictionary is not None else []
    for split in ("train", "valid", "test"):
        arguments += [f"--{split}pref", str(texts / split)]
    with quiet():
        _preprocess.main(fairseq.options.get_preprocessing_parser().parse_args(arguments))
    for handler in list(_preprocess.logger.handlers):  # an empty log file in the folder
        _preprocess.logger.removeHandler(handler)
        handler.close()
    (folder / "preprocess.log").unlink(missing_ok=True)
