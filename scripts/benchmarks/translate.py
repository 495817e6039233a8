"""Measure our beam search against fairseq's SequenceGenerator, with the same weights, in one process.

python -m scripts.benchmarks.translate [run=runs/transformer/transformer_proxy/seed_0] [sentences=1,16,128] [rounds=5]

The run is a finished one: python -m transformer.train experiment=transformer/proxy. Its best model translates its test
split. A second model has the size of the paper's base, and weights that have learned nothing: it shows what the search
costs beside a large model; its translations of made-up sentences always reach the limit of their length. Both searches
take turns batch by batch, so that what slows the machine down slows both alike. Turning tokens into text is not in it.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.report.benchmark import Benchmark
from common.training.compose import compose_config
from common.training.config import ConfigError
from scripts.benchmarks.rounds import median_and_spread
from transformer.batching import batch_by_tokens
from transformer.corpus import Corpus
from transformer.data import ParallelText
from transformer.model import Transformer, mask_of
from transformer.search import EOS, Search, beam_search
from transformer.task import build_model, search_of
from transformer.translation import load_model, read_config, read_state

MODULE = "scripts.benchmarks.translate"
UNTIMED = 1  # rounds before the first that counts
BASE_VOCABULARY = 37_000
BASE_LENGTH = 25  # of made-up sentences, in tokens with EOS: one, so that both searches have one limit
BASE_EXTRA_LENGTH = 5
COLUMNS = {
    "model": "trained: the run's best model on its test split; base: the paper's base size, untrained",
    "batch": "sentences in a batch, of similar lengths",
    "sentences": "sentences translated in a round",
    "sentences_per_s": "ours: sentences over the seconds of a round, median over the rounds",
    "fairseq_sentences_per_s": "the same for SequenceGenerator beside it",
    "speedup": "fairseq's seconds over ours, summed over a round's batches: median over the rounds",
    "spread": "interquartile range of speedup over the rounds",
    "same_percent": "sentences whose best translation is the same, token by token, in percent",
}
FORMATS = {"batch": "d", "sentences": "d", "sentences_per_s": ".1f", "fairseq_sentences_per_s": ".1f"}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.translate."""

    run: Text = Field("runs/transformer/transformer_proxy/seed_0", description="a finished run")
    sentences: Text = Field("1,16,128", pattern=r"^\d+(,\d+)*$", description="in a batch, for the run's model")
    lines: PositiveInt = Field(256, description="of the test split, at most")
    base_sentences: NonNegativeInt = Field(16, description="in the batch of the base model; 0: leave it out")
    rounds: PositiveInt = Field(5, ge=2, description="runs over all batches")
    threads: PositiveInt = Field(1, description="CPU threads")
    output: Text = Field("results/benchmarks", description="where translate.csv and translate.md are written")


@dataclass(frozen=True)
class Setting:
    """One line of the table: a model, how to search, and batches of sources [B, S] padded on the right."""

    name: str
    batch: int
    model: Transformer
    search: Search
    batches: Sequence[Tensor]

    @property
    def sentences(self) -> int:
        """Number of sentences in all batches."""
        return sum(len(batch) for batch in self.batches)


@main_function
def main(argv: Sequence[str]) -> int:
    """Time both searches, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time beam search against fairseq's.")
    benchmark = Benchmark("translate", "Beam search against fairseq's", COLUMNS, FORMATS)
    torch.set_num_threads(arguments.threads)
    try:
        from tests.transformer.fairseq_twin import generator_of

        settings = [*trained(arguments), *base(arguments)]
        rows = [measure(setting, generator_of(setting.model, setting.search), arguments) for setting in settings]
    except ConfigError as error:
        raise UsageError(str(error)) from error
    used = f"{arguments.threads} used"
    benchmark.write(rows, conclude(rows), arguments.output, command_of(MODULE, arguments), used, ("fairseq",))
    return 0


def trained(arguments: BenchArguments) -> Iterator[Setting]:
    """Yield the run's best model on its test split, once for each size of batches."""
    run = Path(arguments.run)
    config = read_config(run)
    corpus, file = Corpus(config.data), run / "checkpoints" / "best.pt"
    model = load_model(config, corpus, read_state(file), str(file), torch.device("cpu"))
    text = corpus.split("test")
    for batch in map(int, arguments.sentences.split(",")):
        yield Setting("trained", batch, model, search_of(config), sources(text, batch, arguments.lines))


def sources(text: ParallelText, size: int, lines: int) -> list[Tensor]:
    """Return the first lines of a split, `size` of similar lengths in a batch."""
    lengths = text.source_lengths[:lines]
    order = batch_by_tokens(lengths, lengths, int(lengths.sum())).order
    chosen = (order[first : first + size] for first in range(0, len(order), size))
    return [text.batch(batch, torch.device("cpu")).source for batch in chosen]


def base(arguments: BenchArguments) -> Iterator[Setting]:
    """Yield the paper's base model with random weights on one batch of made-up sentences."""
    if not arguments.base_sentences:
        return
    torch.manual_seed(0)
    model = build_model(compose_config("transformer", ["model=transformer_base"]), BASE_VOCABULARY).eval()
    source = torch.randint(4, BASE_VOCABULARY, (arguments.base_sentences, BASE_LENGTH))
    source[:, -1] = EOS
    yield Setting("base", len(source), model, Search(extra_length=BASE_EXTRA_LENGTH), [source])


def measure(setting: Setting, generator: Any, arguments: BenchArguments) -> dict[str, object]:
    """Return one line of the table."""
    from tests.transformer.fairseq_twin import sample_of

    results = [each_batch(setting, generator, sample_of, turn) for turn in range(UNTIMED + arguments.rounds)]
    ours, theirs, same = zip(*results[UNTIMED:], strict=True)
    speedups = [other / mine for mine, other in zip(ours, theirs, strict=True)]
    speedup, spread = median_and_spread(speedups)
    return {
        "model": setting.name,
        "batch": setting.batch,
        "sentences": setting.sentences,
        "sentences_per_s": setting.sentences / statistics.median(ours),
        "fairseq_sentences_per_s": setting.sentences / statistics.median(theirs),
        "speedup": speedup,
        "spread": spread,
        "same_percent": 100 * same[-1] / setting.sentences,
    }


def each_batch(
    setting: Setting, generator: Any, sample_of: Callable[[Tensor], dict[str, Any]], turn: int
) -> tuple[float, float, int]:
    """Return (our seconds, fairseq's, sentences translated alike); every second turn fairseq goes first."""
    seconds, same = [0.0, 0.0], 0
    for source in setting.batches:
        sample = sample_of(source)
        searches: list[Callable[[], Any]] = [
            lambda source=source: beam_search(setting.model, source, mask_of(source), setting.search),
            lambda sample=sample: generator.generate([], sample),
        ]
        found: list[Any] = [None, None]
        for who in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            found[who] = searches[who]()
            seconds[who] += time.perf_counter() - started
        ours = [best.tokens for best, *_ in found[0]]
        theirs = [tuple(best["tokens"].tolist()[:-1]) for best, *_ in found[1]]
        same += sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    return seconds[0], seconds[1], same


def conclude(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the table says."""
    least = min(rows, key=lambda row: row["speedup"])
    return [
        "The same weights, sentences, beam and length penalty in both, batch by batch in turns. The fused encoder of "
        "fairseq is off: today's PyTorch refuses it. fairseq takes the longest source of a batch for the limit of all "
        "its sentences, ours has one for each, so a few translations that reach it may differ.",
        f"Ours is {least['speedup']:.2f} times as fast as fairseq's at least ({least['model']}, {least['batch']} "
        f"sentences in a batch).",
    ]


if __name__ == "__main__":
    sys.exit(main())
