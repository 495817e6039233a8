"""Turn documents into token files for training.

python -m gpt2.prepare output=data/openwebtext source=openwebtext                     download, then encode
python -m gpt2.prepare output=data/mine source=FOLDER text_key=text                   .parquet, .jsonl, .txt
python -m gpt2.prepare source=debian_prose                                            from Debian's packages
python -m gpt2.prepare output=data/stdlib source=python_stdlib tokenizer=bpe_1024 validation_fraction=0.05

Documents are split as `datasets.Dataset.train_test_split(fraction, seed=seed, shuffle=True)` splits them, so that
OpenWebText gives the same two sets as public preparations; in the files they keep the source's order. debian_prose's
documents are split by file name, so that another version of the packages gives almost the same split. Preparation can
be interrupted at any time: the same command continues where it stopped.
"""

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, model_validator
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from common.arguments import differences
from common.atomic import describe as described
from common.atomic import write_atomically
from common.cli import Arguments, Text, UsageError, main_function, parse
from common.config.base import Processes
from common.interruptible import interruptible
from common.locks import exclusive
from gpt2.debian_prose import write_prose
from gpt2.documents import InputFile, count, find_inputs
from gpt2.encode import PROGRESS, encode_all, labelled, summarise, unigram_entropy
from gpt2.token_files import HEADER, SPLITS, DataError, Header, open_tokens, read_header
from gpt2.tokenizer import VOCABULARY, load_tokenizer, train_bpe, trained_size

INPUTS = "inputs.sha256"  # in sha256sum's format
BPE_CHARACTERS = 32_000_000  # at most, of the training documents from which a BPE is trained
# The result of public preparations of OpenWebText: their settings and their numbers of tokens.
PUBLIC = {"source": "openwebtext", "encoding": "gpt2", "split": {"fraction": 0.0005, "seed": 2357}}
PUBLIC_TOKENS = {"train": 9_035_582_198, "val": 4_434_897}
# Arguments that do not change the files; source and revision count through the checksums of the documents.
NOT_SHAPING = {"output", "source", "revision", "archives", "processes"}
PROSE = "debian_prose"
PROSE_DEFAULTS = {"output": "data/debian_prose", "tokenizer": "bpe_1024", "validation_fraction": 0.05}
FEW_DOCUMENTS = 10  # for validation

Result = TypeVar("Result")


class PrepareArguments(Arguments):
    """Command line of gpt2.prepare."""

    output: Text = Field(description="the folder to create; debian_prose: data/debian_prose")
    source: Text = Field(
        "openwebtext", description="openwebtext, python_stdlib, debian_prose, hub:OWNER/NAME, file, folder or glob"
    )
    tokenizer: Text = Field(
        "gpt2", description="gpt2, bytes or bpe_N (N tokens, trained on the documents); debian_prose: bpe_1024"
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.0005, description="share of the documents to hold out; debian_prose: 0.05"
    )
    seed: Annotated[int, Field(ge=0)] = Field(2357, description="seed of the split")
    text_key: Text = Field("text", description="column or JSON key that holds the text")
    revision: Text = Field("main", description="branch, tag or commit on the hub")
    processes: Processes | None = Field(None, description="number of threads; null: one per core")
    archives: Text = Field("data/archives", description="folder for downloaded packages; existing ones are reused")

    @property
    def threads(self) -> int:
        """The number of threads."""
        return self.processes or len(os.sched_getaffinity(0))

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_prose(cls, values: dict[str, Any]) -> dict[str, Any]:
        return PROSE_DEFAULTS | values if values.get("source") == PROSE else values


@main_function
@interruptible
def main(argv: Sequence[str]) -> int:
    """Prepare the token files; exit code 2 for invalid arguments or documents."""
    arguments = parse(PrepareArguments, argv, "gpt2.prepare", "Turn documents into token files for training.")
    try:
        header = prepare(arguments)
    except DataError as error:
        raise UsageError(str(error)) from error
    print(describe(header, Path(arguments.output)))
    return 0


def prepare(arguments: PrepareArguments, quiet: bool = False) -> Header:
    """Make train.bin, val.bin and header.json in the output folder unless they exist, and return the header.

    Memory does not grow with the number of documents, except for 4 bytes each while the split is drawn. Raises
    DataError if the documents cannot be read or the folder holds other data.
    """
    trained_size(arguments.tokenizer)
    folder = Path(arguments.output)
    source, packages = arguments.source, []
    if source == PROSE:
        documents, packages = write_prose(Path(arguments.archives))
        source = str(documents)
    files = find_inputs(source, arguments.revision)
    try:
        digests = of_each(lambda file: described(file.path)["sha256"], files, arguments, quiet, "reading")
    except OSError as error:
        raise DataError(f"source={arguments.source}: cannot be read ({error})") from error
    listed = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    inputs = {
        "files": len(files),
        "bytes": sum(file.path.stat().st_size for file in files),
        "sha256": hashlib.sha256(os.fsencode(listed)).hexdigest(),
    }
    inputs |= {"packages": [package.record() for package in packages]} if packages else {}
    if not (folder / HEADER).exists():
        try:
            with exclusive(folder / ".lock"):
                if not (folder / HEADER).exists():  # another process may have made it meanwhile
                    return write(arguments, files, inputs, listed, quiet)
        except OSError as error:
            raise DataError(f"output={folder}: cannot be written ({error}); the same command continues") from error
    return check_same(read_header(folder), inputs, arguments)


def write(
    arguments: PrepareArguments, files: list[InputFile], inputs: dict[str, Any], listed: str, quiet: bool
) -> Header:
    """Encode the documents into the output folder, resuming where an earlier call was interrupted; return the header.

    inputs, listed: what the header says of the files, and their checksums in sha256sum's format
    """
    folder, name, text_key = Path(arguments.output), arguments.tokenizer, arguments.text_key
    documents = sum(of_each(partial(count, text_key=text_key), files, arguments, quiet, "counting"))
    validation = choose_validation(arguments, files, documents)
    vocabulary = ""
    if trained_size(name) is None:
        tokenizer = load_tokenizer(name, folder)
    else:
        tokenizer = train_bpe(name, training_texts(files, inputs["bytes"], text_key, validation), folder)
        vocabulary = described(folder / VOCABULARY)["sha256"]
    settings = arguments.model_dump(exclude=NOT_SHAPING)
    fingerprint = hashlib.sha256(repr((inputs["sha256"], vocabulary, settings)).encode()).hexdigest()
    bar = tqdm(total=documents, unit=" documents", unit_scale=True, disable=True if quiet else None, desc="encoding")
    with bar:
        encode_all(labelled(files, text_key, validation), tokenizer, folder, fingerprint, arguments.threads, bar)
    made = {split: summarise(folder / f"{split}.bin") for split in SPLITS}
    counts = sum(occurrences for occurrences, _ in made.values())
    header = Header(
        format=1,
        encoding=name,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        largest_token=int(counts.nonzero()[0].max()),
        tokens={split: int(occurrences.sum()) for split, (occurrences, _) in made.items()},
        documents={"train": documents - len(validation), "val": len(validation)},
        unigram_entropy=unigram_entropy(counts),
        source=arguments.source,
        split={"fraction": arguments.validation_fraction, "seed": arguments.seed},
        inputs=inputs,
        settings=settings,
        vocabulary=vocabulary,
        sha256={split: digest for split, (_, digest) in made.items()},
    )
    write_atomically(folder / INPUTS, os.fsencode(listed))
    write_atomically(folder / HEADER, header.model_dump_json(indent=2).encode() + b"\n")
    (folder / PROGRESS).unlink()
    return header


def of_each(
    function: Callable[[InputFile], Result],
    files: list[InputFile],
    arguments: PrepareArguments,
    quiet: bool,
    title: str,
) -> list[Result]:
    """Return function(file) for each file, computed by the threads that the arguments ask for."""
    disable = True if quiet else None
    return thread_map(function, files, max_workers=arguments.threads, desc=title, unit=" files", disable=disable)


def choose_validation(arguments: PrepareArguments, files: list[InputFile], documents: int) -> set[int]:
    """Return the numbers of the validation documents. Raises DataError if a split would be empty."""
    if arguments.source == PROSE:  # one document per file
        hashes = (hashlib.sha256(f"{arguments.seed} {file.name}".encode()).hexdigest() for file in files)
        chosen = {i for i, name in enumerate(hashes) if int(name[:8], 16) < arguments.validation_fraction * 2**32}
    else:
        chosen = validation_documents(documents, arguments.validation_fraction, arguments.seed)
    if not 0 < len(chosen) < documents:
        raise DataError(
            f"the source has {documents} documents: expected at least 2, one of them for validation, but "
            f"validation_fraction={arguments.validation_fraction} takes {len(chosen)}"
        )
    return chosen


def validation_documents(documents: int, fraction: float, seed: int) -> set[int]:
    """Return the numbers of the validation documents, as drawn by `datasets`' train_test_split."""
    order = np.arange(documents, dtype=np.uint32)
    np.random.default_rng(seed).shuffle(order)
    return set(order[: math.ceil(fraction * documents)].tolist())


def training_texts(files: list[InputFile], size: int, text_key: str, validation: set[int]) -> Iterator[str]:
    """Yield texts of training documents, spread over the whole source of `size` bytes, up to BPE_CHARACTERS."""
    stride, characters = max(1, size // BPE_CHARACTERS), 0
    for number, (text, split) in enumerate(labelled(files, text_key, validation)):
        if split == "train" and number % stride == 0:
            yield text
            characters += len(text)
            if characters > BPE_CHARACTERS:
                return


def check_same(header: Header, inputs: dict[str, Any], arguments: PrepareArguments) -> Header:
    """Return the header of a finished folder.

    Raises DataError if it was made from other documents or settings, or if its files are not as they were made.
    """
    folder = Path(arguments.output)
    there = {
        "tokenizer": header.encoding,
        "validation_fraction": header.split["fraction"],
        "seed": header.split["seed"],
        "text_key": header.settings.get("text_key", "text"),
        "sha256 of the inputs": header.inputs.get("sha256"),
    }
    wanted = arguments.model_dump(exclude=NOT_SHAPING) | {"sha256 of the inputs": inputs["sha256"]}
    if changed := differences(there, wanted, wanted, "not recorded", "now"):
        raise DataError(
            f"output={folder}: holds other data ({'; '.join(changed)}); expected a new folder, or this one "
            "removed, to prepare it anew"
        )
    for split in SPLITS:
        open_tokens(folder, header, split)
        file = folder / f"{split}.bin"
        if (expected := header.sha256.get(split)) and (found := described(file)["sha256"]) != expected:
            raise DataError(
                f"{file}: sha256 {found}, but {HEADER} says {expected}; remove the folder and prepare it again"
            )
    if header.vocabulary:
        load_tokenizer(header.encoding, folder, header.vocabulary)
    return header


def describe(header: Header, folder: Path) -> str:
    """Summarise the result in a few lines."""
    lines = [
        f"{folder / split}.bin: {header.tokens[split]:,} tokens of {header.documents[split]:,} "
        f"document{'s' * (header.documents[split] != 1)}"
        for split in SPLITS
    ]
    lines += [" ".join(package.values()) for package in header.inputs.get("packages", [])]
    if header.documents["val"] < FEW_DOCUMENTS:
        lines += [
            f"few documents for validation: validation_fraction={header.split['fraction']} of "
            f"{sum(header.documents.values()):,}; a larger fraction, in a new folder, gives more reliable losses"
        ]
    lines += [
        f"encoding {header.encoding}, {header.vocabulary_size:,} tokens; "
        f"unigram entropy {header.unigram_entropy:.4f} nats"
    ]
    if {key: getattr(header, key) for key in PUBLIC} == PUBLIC:
        same = header.tokens == PUBLIC_TOKENS
        expected = " and ".join(f"{PUBLIC_TOKENS[split]:,} ({split})" for split in SPLITS)
        lines += [f"public preparations have {expected} tokens: " + ("the same" if same else "NOT the same")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
