"""Building a data folder from raw pairs; it appears only when complete, with prepared.json saying how it was made."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from common.arguments import differences
from common.config.config import ConfigError
from common.locks import exclusive
from transformer.preparation.files import digest, read_json, write_json
from transformer.preparation.pipeline import SPLITS, Pair, Recipe, Stages
from transformer.text import CODES

RECORD = "prepared.json"
PACKAGES = ("sacremoses", "subword-nmt", "fairseq", "num2words")


def record(folder: Path) -> dict[str, Any] | None:
    """Return the content of prepared.json, or None if the folder was not made by transformer.prepare.

    recipe: the description from which it was made; sha256: of each file

    Raises ConfigError if it is damaged.
    """
    file = folder / RECORD
    if not file.exists():
        return None
    content = read_json(file)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("recipe", "sha256")):
        raise ConfigError(f"{file}: damaged; remove the folder and prepare it again")
    return content


def check_unchanged(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise ConfigError if one of these files is missing or differs from the one that transformer.prepare recorded.

    names: None: all files that it made
    """
    found = record(folder)
    if found is None:
        return
    for name in found["sha256"] if names is None else names:
        expected = found["sha256"].get(name)
        if expected is not None and (not (folder / name).is_file() or digest(folder / name) != expected):
            raise ConfigError(
                f"{folder / name}: not the file that was prepared, by its sha256; remove the folder and prepare it "
                "again"
            )


@contextmanager
def making(output: Path, description: dict[str, Any], key: str) -> Iterator[bool]:
    """Let one process of this machine at a time enter the block; yield whether the folder has yet to be made.

    description: what distinguishes this folder from others
    key:         the argument that names the folder, for messages

    Raises ConfigError if the folder is damaged or holds something else.
    """
    with exclusive(Path(f"{os.path.abspath(output)}.lock")):
        if output.exists():
            changed = ["not made by transformer.prepare"]
            if (found := record(output)) is not None:
                changed = differences(found["recipe"], description, description, "not recorded", "now")
            if changed:
                raise ConfigError(
                    f"{key}={output}: holds other data ({'; '.join(changed)}); remove it or choose another folder"
                )
            check_unchanged(output)
        yield not output.exists()


def build(
    output: Path, recipe: Recipe, description: dict[str, Any], pairs: Mapping[str, Iterable[Pair]], jobs: int
) -> dict[str, int]:
    """Make the data folder `output` from the raw pairs of each split, and return the number of pairs kept.

    description: what distinguishes this folder from others; kept in prepared.json

    Finished work of an interrupted call is reused from <output>.work, which is removed at the end. Raises ConfigError
    if that folder belongs to another description.
    """
    from transformer.fairseq_compat import binarize

    work = output.with_name(f"{output.name}.work")
    begun = read_json(work / RECORD)
    if begun != description and any(work.glob("[!.]*")):
        raise ConfigError(f"{work} holds unfinished work with other settings: {begun}; remove it, or set them again")
    write_json(work / RECORD, description)
    stages = Stages(recipe, work, jobs)
    for split in SPLITS:
        stages.tokenize(split, pairs[split])
    codes = stages.learn()
    stages.encode()
    finished = work / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    counts = stages.join(finished / "raw")
    binarize(work / "texts", finished, recipe.source, recipe.target, jobs)
    shutil.copyfile(codes, finished / CODES)
    files = {str(f.relative_to(finished)): digest(f) for f in sorted(finished.rglob("*")) if f.is_file()}
    made = {
        "recipe": description,
        "pairs": counts,
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "sha256": files,
    }
    write_json(finished / RECORD, made)
    finished.rename(output)
    (work / RECORD).unlink()  # first: what an interruption leaves of the folder must not be reused
    shutil.rmtree(work)
    return counts
