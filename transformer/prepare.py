"""Make a data folder from raw parallel text, in fairseq's binarized format.

python -m transformer.prepare corpus=wmt14_en_de [output=data/wmt14_en_de] [archives=data/archives] [jobs=8]
python -m transformer.prepare corpus=files texts=FOLDER source=en target=de merges=10000 output=data/mine
python -m transformer.prepare corpus=number_names_en_de
python -m transformer.prepare corpus=libreoffice_help_en_de            (or: source=libreoffice_help pair=en-de)

It can be interrupted at any time; called again, it reuses what is finished.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from common.cli import Arguments, Text, UsageError, main_function, parse
from common.config.base import Processes
from common.config.config import ConfigError
from common.interruptible import interruptible
from common.launch.compose import compose_config
from transformer.config import Cleaning, NumberNames, Validation
from transformer.preparation import folder
from transformer.preparation.files import digest, read_text
from transformer.preparation.packaged import help_packages, help_pairs, number_name_pairs
from transformer.preparation.pipeline import SPLITS, Pair, Recipe
from transformer.preparation.wmt14 import read_manifest, wmt14_pairs

CorpusName = Literal[
    "wmt14_en_de",
    "wmt14_en_fr",
    "number_names_en_de",
    "number_names_en_fr",
    "libreoffice_help_en_de",
    "libreoffice_help_en_fr",
    "files",
]
HELP, HELP_MERGES = "libreoffice_help", 2_000


NOT_SHAPING = {"output", "archives", "jobs"}  # arguments that do not change the data; all others are compared
# What shapes a corpus, by the beginning of its name.
SHAPING = {
    "wmt14": {"validation", "cleaning", "merges"},
    "files": {"texts", "source", "target", "cleaning", "merges"},
    "libreoffice_help": {"merges"},
    "number_names": set(),
}
LENGTH_RATIO = {"longest": 250, "max_ratio": 1.5}  # the limits of cleaning=length_ratio


class PrepareArguments(Arguments):
    """Command line of transformer.prepare."""

    corpus: CorpusName = Field(
        description="wmt14_en_de, number_names_en_de, libreoffice_help_en_de (each also with en_fr) or files"
    )
    output: Text | None = Field(None, description="the data folder to create; null: data/<corpus>")
    archives: Text = Field("data/archives", description="folder for downloads; files already there are reused")
    validation: Validation = Field(
        "held_out", description="WMT14: held_out (a slice of the training text, as in the paper) or newstest2013"
    )
    cleaning: Cleaning = Field(
        "empty_lines",
        description="what to drop from WMT14 or, in training, from files: empty_lines, as in the paper, or "
        "length_ratio, also pairs of very different lengths or with more than 250 subwords on a side",
    )
    merges: PositiveInt | None = Field(
        None,
        description="byte pair merges; null: 37000 for WMT14 En-De, 32000 for En-Fr, 2000 for LibreOffice's help; "
        "corpus=files needs a number",
    )
    texts: Text | None = Field(None, description="corpus=files: a folder of {train,valid,test}.{source,target}")
    source: Text | None = Field(None, description="corpus=files: the source language, such as en")
    target: Text | None = Field(None, description="corpus=files: the target language, such as de")
    pair: Literal["en-de", "en-fr"] | None = Field(
        None, description="source=libreoffice_help pair=en-de is short for corpus=libreoffice_help_en_de"
    )
    jobs: Processes = Field(len(os.sched_getaffinity(0)), description="number of processes")

    @model_validator(mode="before")
    @classmethod
    def _help_by_pair(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("source") != HELP or "corpus" in values:
            return values
        if "pair" not in values:
            raise ValueError(f"source={HELP}: expected pair=en-de or pair=en-fr, too")
        others = {name: value for name, value in values.items() if name not in ("source", "pair")}
        return others | {"corpus": f"{HELP}_{values['pair'].replace('-', '_')}"}


@main_function
@interruptible
def main(argv: Sequence[str]) -> int:
    """Make the folder unless it exists; exit code 2 for errors that the user has to correct."""
    arguments = parse(PrepareArguments, argv, "transformer.prepare", "Make a data folder from raw parallel text.")
    output = Path(arguments.output or f"data/{arguments.corpus}")
    (shaping,) = (names for corpus, names in SHAPING.items() if arguments.corpus.startswith(corpus))
    if foreign := sorted(arguments.model_fields_set - shaping - NOT_SHAPING - {"corpus"}):
        takes = f"expected only {', '.join(sorted(shaping))}" if shaping else "which has no such options"
        raise UsageError(f"{foreign[0]}={getattr(arguments, foreign[0])}: not for corpus={arguments.corpus}, {takes}")
    try:
        if arguments.corpus.startswith("number_names"):
            data = compose_config("transformer", [f"data={arguments.corpus}"]).data
            make_embedded(data.model_copy(update={"path": str(output)}), arguments.jobs)
        elif arguments.corpus == "files":
            make_from_files(arguments, output)
        elif arguments.corpus.startswith(HELP):
            make_help(arguments, output)
        else:
            make_wmt14(arguments, output)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    print(f"{output}: ready")
    return 0


def make_embedded(data: NumberNames, jobs: int = 1) -> None:
    """Make the embedded corpus unless it exists; of several concurrent processes, one works and the others wait.

    Raises ConfigError if the folder holds another corpus.
    """
    output = Path(data.path)
    description = data.model_dump(exclude={"path", "max_length"})
    with folder.making(output, description, "data.path") as needed:
        if not needed:
            return
        print(f"making {output} (once, about a minute) ...", file=sys.stderr, flush=True)
        # No pair is dropped: English needs twice as many subwords as German here, so good pairs are uneven.
        recipe = Recipe(data.source, data.target, data.merges, cleaned=(), chunk=5_000)
        folder.build(output, recipe, description, number_name_pairs(data), jobs)


def make_from_files(arguments: PrepareArguments, output: Path) -> None:
    """Make a data folder from the user's text files."""
    missing = [name for name in ("texts", "source", "target", "merges") if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"corpus=files: {', '.join(missing)} missing; see --help")
    source, target = str(arguments.source), str(arguments.target)
    texts, limits = Path(str(arguments.texts)), LENGTH_RATIO if arguments.cleaning == "length_ratio" else {}
    recipe = Recipe(source, target, arguments.merges or 0, **limits)
    sides = [f"{split}.{language}" for split in SPLITS for language in (source, target)]
    try:
        content = {f"sha256 of {side}": digest(texts / side) for side in sides}
    except OSError as error:
        raise ConfigError(f"texts={texts}: {error}") from error
    description = arguments.model_dump(include={"corpus", *SHAPING["files"]})
    description |= {"texts": str(texts.resolve())} | content
    with folder.making(output, description, "output") as needed:
        if not needed:
            return
        for split in SPLITS:  # before any work that would be lost
            if not sum(1 for _ in file_pairs(texts, split, source, target)):
                raise ConfigError(f"texts={texts}: {split}.{source} and {split}.{target} have no lines")
        pairs = {split: file_pairs(texts, split, source, target) for split in SPLITS}
        print_counts(folder.build(output, recipe, description, pairs, arguments.jobs))


def make_wmt14(arguments: PrepareArguments, output: Path) -> None:
    """Make a WMT14 data folder, downloading the archives that are missing."""
    manifest, archives = read_manifest(), Path(arguments.archives)
    pair = manifest.pairs[arguments.corpus]
    merges = arguments.merges or pair.merges
    # A slice of the training text is cleaned like the rest of it; newstest2013 is not.
    cleaned = ("train", "valid") if arguments.validation == "held_out" else ("train",)
    limits = LENGTH_RATIO if arguments.cleaning == "length_ratio" else {}
    recipe = Recipe(pair.source, pair.target, merges, cleaned=cleaned, **limits)
    description = arguments.model_dump(include={"corpus", *SHAPING["wmt14"]})
    description |= {"source": pair.source, "target": pair.target, "merges": merges}
    with folder.making(output, description, "output") as needed:
        if not needed:
            return
        corpora = [*pair.train, pair.test, *([pair.valid] if arguments.validation == "newstest2013" else [])]
        names = dict.fromkeys(corpus.archive for corpus in corpora)
        seen = [manifest.archives[name].fetch(archives) for name in names]
        for archive in seen:
            print(f"{archive['file']}: sha256 {archive['sha256']}, {archive['checked']}")
        pairs = wmt14_pairs(manifest, pair, archives, arguments.validation)
        print_counts(folder.build(output, recipe, description | {"archives": seen}, pairs, arguments.jobs))


def make_help(arguments: PrepareArguments, output: Path) -> None:
    """Make a data folder of LibreOffice's help, downloading the packages that are missing."""
    source, target = arguments.corpus.removeprefix(f"{HELP}_").split("_")
    merges = arguments.merges or HELP_MERGES
    packages = help_packages(source, target, Path(arguments.archives))
    print(*packages, sep="\n")
    description = {"corpus": arguments.corpus, "source": source, "target": target, "merges": merges}
    description |= {"packages": [package.record() for package in packages]}
    with folder.making(output, description, "output") as needed:
        if not needed:
            return
        pairs = help_pairs(source, target, packages)
        recipe = Recipe(source, target, merges, cleaned=(), chunk=5_000)
        print_counts(folder.build(output, recipe, description, pairs, arguments.jobs))


def print_counts(counts: Mapping[str, int]) -> None:
    """Print how many pairs of each split were kept."""
    print(", ".join(f"{split}: {count:,} pairs" for split, count in counts.items()))


def file_pairs(texts: Path, split: str, source: str, target: str) -> Iterator[Pair]:
    """Yield the line pairs of two text files. Raises ConfigError if one is missing or their lengths differ."""
    sides = [texts / f"{split}.{language}" for language in (source, target)]
    try:
        yield from zip(*(read_text(side) for side in sides), strict=True)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"texts={texts}: {error}") from error
    except ValueError as error:
        lengths = " and ".join(f"{side.name} ({sum(1 for _ in read_text(side))} lines)" for side in sides)
        raise ConfigError(f"texts={texts}: {lengths} differ in length") from error


if __name__ == "__main__":
    sys.exit(main())
