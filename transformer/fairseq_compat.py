"""fairseq under today's Python: what reads and writes data goes through this module.

fairseq 0.12.2 is the last release and is not maintained any more. It is used for its data format (dictionaries and
memory-mapped `.bin`/`.idx` files), so that data made by `fairseq-preprocess` can be trained on, and by tests that
compare model, loss and search with it. Training itself runs no code of fairseq.

Importing this module imports fairseq. Python 3.11 refuses mutable dataclass defaults that cannot be hashed, so
fairseq's dataclasses get a hash on the way. Its own console scripts know nothing of this: use
`python -m transformer.prepare`.

Raises FairseqMissing if fairseq is not installed.
"""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore

from common.training.config import ConfigError

INSTALL = "pip install bitarray cffi regex sacrebleu; pip install --no-deps fairseq==0.12.2 (needs a C++ compiler)"


class FairseqMissing(ConfigError, ImportError):  # noqa: N818 - a state of the installation
    """fairseq cannot be imported; the message says why and how to install it."""


@contextlib.contextmanager
def hashable_dataclasses(package: str) -> Iterator[None]:
    """Dataclasses that the package defines inside the block can be hashed, and so may be defaults of others."""
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
    """No messages inside the block, and the root logger as it was afterwards: fairseq sets it up at import."""
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
def own_configs() -> Iterator[None]:
    """Hydra's store as it was before: fairseq's entries there would be taken for schemas of ours (optimizer/adam)."""
    store = ConfigStore.instance()
    before = copy.deepcopy(store.repo)
    try:
        yield
    finally:
        store.repo = before


def _import() -> tuple[ModuleType, ModuleType]:
    try:
        with quiet(), own_configs(), hashable_dataclasses("fairseq"):
            import fairseq.options
            from fairseq_cli import preprocess
    except ImportError as error:
        raise FairseqMissing(f"fairseq cannot be imported ({error}); `make env` installs it, or: {INSTALL}") from error
    return fairseq, preprocess


fairseq, _preprocess = _import()
Dictionary = fairseq.data.Dictionary
TokenData = fairseq.data.indexed_dataset.MMapIndexedDataset
INDEX_MAGIC = TokenData.Index._HDR_MAGIC


def read_dictionary(folder: Path, language: str) -> Any:
    """dict.<language>.txt of a folder; ConfigError if it is missing or no dictionary."""
    file = folder / f"dict.{language}.txt"
    try:
        return Dictionary.load(str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path={folder}: {file.name} cannot be read ({error})") from error


def read_tokens(folder: Path, split: str, pair: str, language: str) -> Any:
    """A memory-mapped side of a split: `len`, `.sizes`, and `[i]` for tokens with EOS; ConfigError if it is not there.

    pair: source and target language as in file names, "en-de".
    """
    prefix = folder / f"{split}.{pair}.{language}"
    for suffix in (".idx", ".bin"):
        if not prefix.with_name(prefix.name + suffix).is_file():
            raise ConfigError(f"data.path={folder}: {prefix.name}{suffix} is missing")
    try:
        check_format(prefix.with_name(f"{prefix.name}.idx"))
        return TokenData(str(prefix))
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.path={folder}: {prefix.name} is not fairseq's mmap format ({error})") from error


def check_format(index: Path) -> None:
    """ValueError if an .idx file is not of the mmap format; fairseq's own reader would also complain on the way out."""
    with index.open("rb") as stream:
        if stream.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise ValueError(f"{index.name} does not begin as one")


def binarize(texts: Path, folder: Path, source: str, target: str, jobs: int, dictionary: Path | None = None) -> None:
    """What `fairseq-preprocess` does with texts/{train,valid,test}.{source,target}: tokens, spaces between.

    Writes a joint dictionary (or takes the given one) and all splits into `folder`.
    """
    arguments = ["--source-lang", source, "--target-lang", target, "--joined-dictionary", "--workers", str(jobs)]
    arguments += ["--destdir", str(folder), "--dataset-impl", "mmap"]
    arguments += ["--srcdict", str(dictionary)] if dictionary is not None else []
    for split in ("train", "valid", "test"):
        arguments += [f"--{split}pref", str(texts / split)]
    with quiet():
        _preprocess.main(fairseq.options.get_preprocessing_parser().parse_args(arguments))
    for handler in list(_preprocess.logger.handlers):  # a log file in the folder, which says nothing
        _preprocess.logger.removeHandler(handler)
        handler.close()
    (folder / "preprocess.log").unlink(missing_ok=True)
