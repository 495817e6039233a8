"""Turn documents into token files for training.

python -m gpt2.prepare output=data/openwebtext source=openwebtext                     download, then encode
python -m gpt2.prepare output=data/openwebtext source=openwebtext --streaming         keep no copy of the documents
python -m gpt2.prepare output=data/mine source=FOLDER text_key=text                   .parquet, .jsonl, .txt
python -m gpt2.prepare source=debian_prose                                            out of Debian's packages
python -m gpt2.prepare output=data/stdlib source=python_stdlib tokenizer=bpe_1024 validation_fraction=0.05

Documents are split as `datasets.Dataset.train_test_split(fraction, seed=seed, shuffle=True)` splits them, so that
OpenWebText gives the same two sets as public preparations; their order in the files is that of the source. Those of
debian_prose are split by the names of their files, so that another version of the packages gives almost the same split.
It can be interrupted at any time: the same command continues where it was.
"""

import bisect
import contextlib
import hashlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, model_validator
from tqdm import tqdm

from common.cli import Arguments, Text, UsageError, main_function, parse
from common.interruptible import interruptible
from common.locks import exclusive
from common.training.atomic import write_atomically
from gpt2.debian_prose import write_prose
from gpt2.documents import Scanned, Unit, read, scan
from gpt2.encode import Job, encode, parallel_map
from gpt2.sources import InputFile, find_inputs
from gpt2.token_files import FORMAT, HEADER, SPLITS, DataError, Header, open_tokens, read_header
from gpt2.token_writer import TokenWriter, unigram_entropy
from gpt2.tokenizer import VOCABULARY, Tokenizer, load_tokenizer, train_bpe, trained_size

INPUTS = "inputs.sha256"  # in sha256sum's format
BPE_CHARACTERS = 32_000_000  # at most, of the training documents from which a BPE is trained
# The result of public preparations of OpenWebText (GPT-2's encoding, 0.0005 for validation, seed 2357).
PUBLIC_TOKENS = {"train": 9_035_582_198, "val": 4_434_897}
# Arguments that leave the files as they are; source and revision count by the checksums of the documents.
NOT_SHAPING = {"output", "source", "revision", "archives", "processes", "streaming"}
PROSE = "debian_prose"
PROSE_DEFAULTS = {"output": "data/debian_prose", "tokenizer": "bpe_1024", "validation_fraction": 0.05}
FEW_DOCUMENTS = 10  # for validation


class PrepareArguments(Arguments):
    """Command line of gpt2.prepare."""

    output: Text = Field(description="the folder to make; debian_prose: data/debian_prose")
    source: Text = Field(
        "openwebtext", description="openwebtext, python_stdlib, debian_prose, hub:OWNER/NAME, file, folder or glob"
    )
    tokenizer: Text = Field(
        "gpt2", description="gpt2, bytes or bpe_N (N tokens, trained from the documents); debian_prose: bpe_1024"
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.0005, description="share of the documents; debian_prose: 0.05"
    )
    seed: Annotated[int, Field(ge=0)] = Field(2357, description="seed of the split")
    text_key: Text = Field("text", description="column or JSON key that holds the text")
    revision: Text = Field("main", description="branch, tag or commit on the hub")
    processes: PositiveInt | None = Field(None, description="null: one for each core")
    archives: Text = Field("data/archives", description="where packages are downloaded to, or already are")
    streaming: bool = Field(False, description="read the hub's files over the network, keep no copy")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_prose(cls, values: dict[str, Any]) -> dict[str, Any]:
        return PROSE_DEFAULTS | values if values.get("source") == PROSE else values


@dataclass(frozen=True)
class Corpus:
    """All units of a source.

    inputs:   checksums of all files, in sha256sum's format
    packages: those that the documents come from, for the header
    """

    units: tuple[Unit, ...]
    bytes: int
    inputs: str
    packages: list[dict[str, str]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The sha256 of `inputs`, which identifies the documents."""
        return hashlib.sha256(self.inputs.encode()).hexdigest()

    @property
    def first_documents(self) -> list[int]:
        """The number of the first document of each unit, followed by the number of all documents."""
        return list(accumulate((unit.documents for unit in self.units), initial=0))

    @property
    def documents(self) -> int:
        """The number of all documents."""
        return sum(unit.documents for unit in self.units)


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

    Memory does not grow with the corpus, except for 4 bytes per document while the split is drawn. Raises DataError if
    the documents cannot be read or the folder holds other data.
    """
    trained_size(arguments.tokenizer)
    processes = arguments.processes or len(os.sched_getaffinity(0))
    folder = Path(arguments.output)
    source, packages = arguments.source, []
    if source == PROSE:
        documents, packages = write_prose(Path(arguments.archives))
        source = str(documents)
    corpus = scan_all(find_inputs(source, arguments.revision, arguments.streaming), processes, quiet)
    corpus = replace(corpus, packages=[package.record() for package in packages])
    if not (folder / HEADER).exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"output={folder}: cannot be made ({error.strerror})") from error
        with exclusive(folder / ".lock"):
            if not (folder / HEADER).exists():  # another process may have made it meanwhile
                return write(arguments, corpus, processes, quiet)
    return check_same(read_header(folder), corpus, arguments)


def write(arguments: PrepareArguments, corpus: Corpus, processes: int, quiet: bool) -> Header:
    """Encode the corpus into the output folder, going on where an earlier call was interrupted; return the header."""
    folder = Path(arguments.output)
    validation = choose_validation(arguments, corpus)
    parts = folder / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    tokenizer, vocabulary = choose_tokenizer(arguments, corpus, validation, folder)
    writer = TokenWriter(folder, fingerprint(arguments, corpus, vocabulary))
    try:
        jobs = make_jobs(arguments, corpus, validation, vocabulary, writer.progress.units)
        with (
            tqdm(
                total=corpus.documents,
                initial=sum(writer.progress.documents.values()),
                unit=" documents",
                unit_scale=True,
                disable=True if quiet else None,
                desc="encoding",
            ) as bar,
            contextlib.closing(parallel_map(encode, jobs, processes)) as encoded,
        ):
            for job, documents in zip(jobs, encoded, strict=True):
                writer.append(job.part, documents)
                bar.update(sum(documents.values()))
                bar.set_postfix_str(f"{sum(writer.progress.bytes.values()) / 2e6:,.1f}M tokens")
        header = make_header(arguments, corpus, tokenizer, vocabulary, writer)
        write_atomically(folder / INPUTS, corpus.inputs.encode())
    except BaseException as error:  # interrupted: the next start continues from here
        for step in (writer.save, writer.close):
            with contextlib.suppress(OSError):  # a full disk: the next start continues from what was saved before
                step()
        if isinstance(error, OSError):
            message = f"output={folder}: cannot be written ({error}); the same command continues"
            raise DataError(message) from error
        raise
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    writer.finish(header)
    return header


def scan_all(files: list[InputFile], processes: int, quiet: bool) -> Corpus:
    """Checksum all files and cut them into units, in parallel."""
    # Starting a process takes longer than reading a few files.
    few = sum(file.bytes for file in files) < 64e6
    with contextlib.closing(parallel_map(scan, files, 1 if few else processes)) as results:
        bar = tqdm(results, total=len(files), unit=" files", disable=True if quiet else None, desc="reading")
        scanned: list[Scanned] = list(bar)
    inputs = "".join(f"{result.sha256}  {file.name}\n" for result, file in zip(scanned, files, strict=True))
    units = tuple(unit for result in scanned for unit in result.units)
    return Corpus(units, sum(file.bytes for file in files), inputs)


def choose_validation(arguments: PrepareArguments, corpus: Corpus) -> list[int]:
    """Return the numbers of the validation documents, sorted."""
    if arguments.source != PROSE:
        return validation_documents(corpus.documents, arguments.validation_fraction, arguments.seed)
    hashes = (hashlib.sha256(f"{arguments.seed} {unit.file.name}".encode()).hexdigest() for unit in corpus.units)
    return [
        document
        for document, name in zip(corpus.first_documents, hashes, strict=False)
        if int(name[:8], 16) < arguments.validation_fraction * 2**32
    ]


def validation_documents(documents: int, fraction: float, seed: int) -> list[int]:
    """Return the numbers of the validation documents, sorted: those that train_test_split of `datasets` draws.

    Raises DataError if nothing would be left for training.
    """
    count = math.ceil(fraction * documents)
    if documents - count < 1:
        raise DataError(f"the source has {documents} documents: expected at least 2, one of them for validation")
    order = np.arange(documents, dtype=np.uint32)
    np.random.default_rng(seed).shuffle(order)
    return sorted(order[:count].tolist())


def choose_tokenizer(
    arguments: PrepareArguments, corpus: Corpus, validation: list[int], folder: Path
) -> tuple[Tokenizer, str]:
    """Return the tokenizer, trained from the training documents if it is a BPE, and its vocabulary's checksum."""
    if trained_size(arguments.tokenizer) is None:
        return load_tokenizer(arguments.tokenizer, folder), ""
    tokenizer = train_bpe(arguments.tokenizer, training_texts(arguments, corpus, validation), folder)
    return tokenizer, hashlib.sha256((folder / VOCABULARY).read_bytes()).hexdigest()


def training_texts(arguments: PrepareArguments, corpus: Corpus, validation: list[int]) -> Iterator[str]:
    """Yield texts of training documents, from units spread over the whole source, up to BPE_CHARACTERS."""
    share = BPE_CHARACTERS / max(corpus.bytes, 1)
    stride = max(1, math.floor(1 / share))
    forbidden, characters = set(validation), 0
    for unit, first in list(zip(corpus.units, corpus.first_documents, strict=False))[::stride]:
        document = first
        for text, ends in read(unit, arguments.text_key):
            if document not in forbidden:
                yield text
                characters += len(text)
            document += ends
            if characters > BPE_CHARACTERS:
                return


def make_jobs(
    arguments: PrepareArguments, corpus: Corpus, validation: list[int], vocabulary: str, done: int
) -> list[Job]:
    """Return the jobs for all units that are not yet encoded."""
    folder = Path(arguments.output)
    jobs = []
    for index, (unit, first) in enumerate(zip(corpus.units, corpus.first_documents, strict=False)):
        if index >= done:
            # A text that continues in the next unit is a document of this one too.
            low, high = (bisect.bisect_left(validation, n) for n in (first, first + unit.documents + 1))
            chosen = tuple(number - first for number in validation[low:high])
            part = folder / "parts" / f"{index:08d}"
            jobs.append(Job(unit, chosen, arguments.tokenizer, vocabulary, folder, arguments.text_key, part))
    return jobs


def shaping(arguments: PrepareArguments) -> dict[str, Any]:
    """Return the settings that, with documents and vocabulary, determine the content of the files."""
    return arguments.model_dump(exclude=NOT_SHAPING)


def fingerprint(arguments: PrepareArguments, corpus: Corpus, vocabulary: str) -> str:
    """Identify the output: an interrupted preparation continues only with the same fingerprint."""
    content = (FORMAT, corpus.digest, vocabulary, sorted(shaping(arguments).items()))
    return hashlib.sha256(repr(content).encode()).hexdigest()


def make_header(
    arguments: PrepareArguments, corpus: Corpus, tokenizer: Tokenizer, vocabulary: str, writer: TokenWriter
) -> Header:
    """Make the header of the files just written."""
    progress = writer.progress
    return Header(
        format=FORMAT,
        encoding=tokenizer.name,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        largest_token=int(writer.counts.nonzero()[0].max()),
        tokens={split: progress.bytes[split] // 2 for split in SPLITS},
        documents=dict(progress.documents),
        unigram_entropy=unigram_entropy(writer.counts),
        source=arguments.source,
        split={"fraction": arguments.validation_fraction, "seed": arguments.seed},
        inputs={"files": len(corpus.inputs.splitlines()), "bytes": corpus.bytes, "sha256": corpus.digest}
        | ({"packages": corpus.packages} if corpus.packages else {}),
        settings=shaping(arguments),
        vocabulary=vocabulary,
    )


def check_same(header: Header, corpus: Corpus, arguments: PrepareArguments) -> Header:
    """Return the header of a finished folder.

    Raises DataError if it was made from other documents or settings, or if its files are not whole.
    """
    recorded = {"tokenizer": header.encoding, "validation_fraction": header.split["fraction"]}
    there = header.settings or recorded | {"seed": header.split["seed"]}
    wanted = {
        key: (there.get(key), value) for key, value in shaping(arguments).items() if key in there or header.settings
    }
    wanted |= {"sha256 of the inputs": (header.inputs["sha256"], corpus.digest)}
    differences = [f"{key}: {before} there, {now} now" for key, (before, now) in wanted.items() if before != now]
    if not differences and not header.settings and not begins_alike(corpus, arguments):
        differences = ["its first tokens: other ones would be made now"]
    if differences:
        raise DataError(
            f"output={arguments.output}: holds other data ({'; '.join(differences)}); expected a new folder, or this "
            "one removed, to prepare it anew"
        )
    for split in SPLITS:
        open_tokens(Path(arguments.output), header, split)
    if header.vocabulary:
        load_tokenizer(header.encoding, Path(arguments.output), header.vocabulary)
    return header


def begins_alike(corpus: Corpus, arguments: PrepareArguments) -> bool:
    """Encode the first documents anew and compare: folders made before their settings were recorded may hide others."""
    validation = choose_validation(arguments, corpus)
    file = Path(arguments.output) / VOCABULARY
    vocabulary = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
    first, *_ = make_jobs(arguments, corpus, validation, vocabulary, 0)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "first"
        encode(replace(first, part=part))
        for split in SPLITS:
            expected = part.with_suffix(f".{split}").read_bytes()
            with (Path(arguments.output) / f"{split}.bin").open("rb") as stream:
                if stream.read(len(expected)) != expected:
                    return False
    return True


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
            f"{sum(header.documents.values()):,}; a larger fraction, in a new folder, gives losses that say more"
        ]
    lines += [
        f"encoding {header.encoding}, {header.vocabulary_size:,} tokens; "
        f"unigram entropy {header.unigram_entropy:.4f} nats"
    ]
    public = {"source": "openwebtext", "encoding": "gpt2", "split": {"fraction": 0.0005, "seed": 2357}}
    if {key: getattr(header, key) for key in public} == public:
        same = header.tokens == PUBLIC_TOKENS
        expected = " and ".join(f"{PUBLIC_TOKENS[split]:,} ({split})" for split in SPLITS)
        lines += [f"public preparations get {expected} tokens: " + ("the same" if same else "NOT the same")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
