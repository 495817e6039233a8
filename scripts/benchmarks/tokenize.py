"""Measure how fast gpt2.prepare turns documents into token files, against tiktoken's own encode_ordinary_batch.

python -m scripts.benchmarks.tokenize [tokenizer=gpt2] [copies=16] [processes=2] [rounds=5] [output=results/benchmarks]

The corpus is the Python standard library's sources, several times over, in parquet files like OpenWebText's. Preparing
it means all that the command does, from reading the files to the header; tiktoken gets the texts in memory, in batches,
with as many threads as the preparation, and its tokens are thrown away. The two take turns, and ratios
are taken within a turn. GPT-2's vocabulary is a download: where it is missing, tokenizer=bpe_N takes a BPE of N tokens
that is trained from the corpus first, which is not timed.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pyarrow as pa
import tiktoken
from pyarrow import parquet
from pydantic import Field, PositiveInt
from tiktoken.load import load_tiktoken_bpe

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.report.benchmark import Benchmark
from gpt2.prepare import PrepareArguments, prepare
from gpt2.sources import STDLIB, find_inputs
from gpt2.token_files import SPLITS, DataError
from gpt2.tokenizer import END_OF_TEXT, VOCABULARY, WORDS, Tokenizer, load_tokenizer, train_bpe, trained_size
from scripts.benchmarks.rounds import median_and_spread, rounds_in_turn

MODULE = "scripts.benchmarks.tokenize"
BATCH = 256  # documents in a call of encode_ordinary_batch
ROW_GROUP = 128  # documents in a row group
COLUMNS = {
    "what": "prepare: gpt2.prepare, parquet files to token files; tiktoken: encode_ordinary_batch of texts in memory",
    "tokens_per_s": "tokens (without end-of-text) / seconds, median over the rounds",
    "mb_per_s": "UTF-8 bytes of the texts / 1e6 / seconds, median over the rounds",
    "spread": "interquartile range of tokens_per_s over the rounds, in percent of the median",
    "ratio_to_tiktoken": "tokens_per_s over that of tiktoken in the same round, median over the rounds",
}
FORMATS = {"tokens_per_s": ",.0f", "mb_per_s": ".1f", "spread": ".0f", "ratio_to_tiktoken": ".3f"}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.tokenize."""

    tokenizer: Text = Field("gpt2", description="gpt2, or bpe_N (N tokens, trained from the corpus)")
    documents: PositiveInt | None = Field(None, ge=2, description="files of the standard library to take; null: all")
    copies: PositiveInt = Field(16, description="of the standard library in the corpus, a parquet file each")
    processes: PositiveInt = Field(2, description="threads of the preparation, and of tiktoken")
    rounds: PositiveInt = Field(5, ge=2, description="turns of each")
    output: Text = Field("results/benchmarks", description="where tokenize.csv and tokenize.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Make a corpus, time both, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time the preparation of tokens.")
    benchmark = Benchmark("tokenize", "Preparing tokens", COLUMNS, FORMATS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_corpus(folder / "corpus", arguments)
        try:
            tokenizer = make_tokenizer(arguments.tokenizer, texts[: len(texts) // arguments.copies], folder)
        except DataError as error:
            raise UsageError(str(error)) from error
        contenders = {
            "prepare": lambda _: time_prepare(folder, tokenizer, arguments),
            "tiktoken": lambda _: time_tiktoken(texts, folder, tokenizer, arguments),
        }
        timed = rounds_in_turn(contenders, arguments.rounds)
    tokens, encoded = (timed[what][-1][1] for what in ("prepare", "tiktoken"))
    if tokens != encoded:
        raise RuntimeError(f"gpt2.prepare wrote {tokens} tokens, tiktoken gives {encoded}")
    seconds = {what: [duration for duration, _ in results] for what, results in timed.items()}
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rows = [row(what, seconds, tokens, megabytes) for what in seconds]
    said = conclude(rows, arguments, tokens, megabytes)
    used = f"{arguments.processes} used"
    packages = ["tiktoken", "pyarrow"]
    benchmark.write(rows, said, arguments.output, command_of(MODULE, arguments), used, packages)
    return 0


def write_corpus(folder: Path, arguments: BenchArguments) -> list[str]:
    """Write `copies` parquet files; returns all their texts in order."""
    folder.mkdir()
    files = find_inputs(STDLIB)[: arguments.documents]
    texts = [Path(file.location).read_text(encoding="utf-8", errors="replace") for file in files]
    for number in range(arguments.copies):
        parquet.write_table(pa.table({"text": texts}), folder / f"{number:05d}.parquet", row_group_size=ROW_GROUP)
    return texts * arguments.copies


def make_tokenizer(name: str, texts: list[str], folder: Path) -> Tokenizer:
    """Return the tokenizer; a trained one is saved in `folder`. Raises DataError."""
    if name == "bytes":
        raise DataError("tokenizer=bytes: tiktoken has no part in it; expected gpt2 or bpe_N")
    return load_tokenizer(name, folder) if trained_size(name) is None else train_bpe(name, texts, folder)


def time_prepare(folder: Path, tokenizer: Tokenizer, arguments: BenchArguments) -> tuple[float, int]:
    """Return the seconds that preparing the corpus takes, and the number of its tokens without end-of-text."""
    output, vocabulary = folder / "prepared", folder / VOCABULARY
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    if vocabulary.exists():
        shutil.copyfile(vocabulary, output / VOCABULARY)
    settings = PrepareArguments(
        output=str(output), source=str(folder / "corpus"), tokenizer=tokenizer.name, processes=arguments.processes
    )
    with mock.patch("gpt2.prepare.train_bpe", return_value=tokenizer):  # trained once, not every round
        since = time.perf_counter()
        header = prepare(settings, quiet=True)
        taken = time.perf_counter() - since
    return taken, sum(header.tokens[split] - header.documents[split] for split in SPLITS)


def time_tiktoken(texts: list[str], folder: Path, tokenizer: Tokenizer, arguments: BenchArguments) -> tuple[float, int]:
    """Return the seconds that tiktoken by itself takes for the texts, and the number of their tokens."""
    encoding, count = tiktoken_encoding(tokenizer.name, folder), 0
    since = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        batch = encoding.encode_ordinary_batch(texts[first : first + BATCH], num_threads=arguments.processes)
        count += sum(map(len, batch))
    return time.perf_counter() - since, count


def tiktoken_encoding(name: str, folder: Path) -> tiktoken.Encoding:
    """Return the encoding as one would make it without this project."""
    if name == "gpt2":
        return tiktoken.get_encoding(name)
    ranks = load_tiktoken_bpe(str(folder / VOCABULARY))
    return tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def row(what: str, seconds: dict[str, list[float]], tokens: int, megabytes: float) -> dict[str, object]:
    """Return one line of the table."""
    rates = [tokens / duration for duration in seconds[what]]
    median, spread = median_and_spread(rates)
    ratios = [other / mine for other, mine in zip(seconds["tiktoken"], seconds[what], strict=True)]
    return {
        "what": what,
        "tokens_per_s": median,
        "mb_per_s": median * megabytes / tokens,
        "spread": 100 * spread / median,
        "ratio_to_tiktoken": statistics.median(ratios),
    }


def conclude(rows: Sequence[dict[str, object]], arguments: BenchArguments, tokens: int, megabytes: float) -> list[str]:
    """Return what was measured and what it says."""
    (ratio,) = (row["ratio_to_tiktoken"] for row in rows if row["what"] == "prepare")
    return [
        f"The Python standard library's sources {arguments.copies} times over: {megabytes:.0f} MB, {tokens:,} tokens "
        f"of {arguments.tokenizer}; {arguments.processes} processes or threads; {arguments.rounds} rounds.",
        f"gpt2.prepare reaches {100 * ratio:.0f} % of tiktoken's own encode_ordinary_batch.",
    ]


if __name__ == "__main__":
    sys.exit(main())
