"""Translate raw lines from standard input to standard output; load the models of a run for translation.

python -m transformer.translate checkpoint=runs/transformer/proxy/seed_0/checkpoints/best.pt < text
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt, ValidationError
from torch import Tensor
from yaml import YAMLError

from common.cli import Arguments, Text, UsageError, explain_mistake, main_function, one_line, parse
from common.config.config import ConfigError
from common.record.checkpoint import MODELS, fill_model, read_model
from transformer.batching import batch_by_tokens
from transformer.config import TrainedConfig
from transformer.corpus import Corpus
from transformer.data import ParallelText, evaluation_batches, pad
from transformer.model import Transformer, mask_of
from transformer.preparation.files import decoded
from transformer.search import Hypothesis, Search, beam_search
from transformer.task import build_model, check_beam, search_of

LINES_AT_A_TIME = 512

State = dict[str, Tensor]


class TranslateArguments(Arguments):
    """Command line of transformer.translate."""

    checkpoint: Text = Field(description="a mean model, such as RUN_DIR/checkpoints/best.pt")
    run: Text | None = Field(None, description="the run folder with its config.yaml; null: the checkpoint's")
    data: Text | None = Field(None, description="the data folder; null: the run's")
    beam: PositiveInt | None = Field(None, description="beam size; null: as in the run")
    length_penalty: float | None = Field(None, description="length penalty; null: as in the run")
    batch_size: PositiveInt = Field(4096, description="source tokens per batch")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda")


@main_function
def main(argv: Sequence[str]) -> int:
    """Translate until the input ends; exit code 2 if the checkpoint or its data cannot be used."""
    arguments = parse(TranslateArguments, argv, "transformer.translate", "Translate lines of standard input.")
    try:
        checkpoint = Path(arguments.checkpoint)
        above = checkpoint.resolve().parent
        own = (above.parent if above.name == MODELS else above).parent
        run = open_run(Path(arguments.run or own), arguments.data, arguments.device)
        chosen = {"beam": arguments.beam, "length_penalty": arguments.length_penalty}
        search = replace(search_of(run.config), **{key: value for key, value in chosen.items() if value is not None})
        check_beam(search.beam, run.corpus.vocabulary, "decoding.beam" if arguments.beam is None else "beam")
        translator = run.translator([checkpoint], search, arguments.batch_size)
        # A person at a terminal waits for each line; a file is translated in larger batches.
        at_a_time = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
        sys.stdout.reconfigure(encoding="utf-8")  # as the input
        lines = (line.rstrip("\r") for line in decoded(sys.stdin.buffer, "standard input"))
        while chunk := list(itertools.islice(lines, at_a_time)):
            for translation in translator.lines(chunk):
                print(translation, flush=at_a_time == 1)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return 0


@dataclass(frozen=True)
class Translator:
    """A model in evaluation mode on `device`, with everything needed to translate.

    batch_size: source tokens in a batch
    """

    model: Transformer
    corpus: Corpus
    search: Search
    batch_size: int
    device: torch.device

    def lines(self, lines: Sequence[str]) -> list[str]:
        """Translate raw lines; a line without any word stays empty."""
        sources = [self.corpus.encode(line) for line in lines]
        full = [i for i, source in enumerate(sources) if len(source) > 1]  # more than EOS
        lengths = np.array([len(sources[i]) for i in full], dtype=np.int64)
        translated = [""] * len(lines)
        batches = batch_by_tokens(lengths, lengths, self.batch_size)
        for number in range(len(batches)):
            chosen = [full[i] for i in batches[number]]
            found = self._search(pad([sources[i] for i in chosen]).to(self.device))
            for i, (best, *_) in zip(chosen, found, strict=True):
                translated[i] = self.corpus.line(best.tokens)
        return translated

    def split(self, text: ParallelText) -> list[tuple[int, ...]]:
        """Return the tokens of the best translation of every source sentence of a split, in its order."""
        best: list[tuple[int, ...]] = [()] * len(text)
        for batch in evaluation_batches(text, 0, 1, self.batch_size, self.device):
            for sentence, (first, *_) in zip(batch.sentences, self._search(batch.source), strict=True):
                best[sentence] = first.tokens
        return best

    def _search(self, source: Tensor) -> list[list[Hypothesis]]:
        return beam_search(self.model, source, mask_of(source), self.search)


@dataclass(frozen=True)
class TrainedRun:
    """A run whose models are to be used: its configuration, its data, and the device to use them on."""

    config: TrainedConfig
    corpus: Corpus
    device: torch.device

    def translator(self, files: Sequence[Path], search: Search, batch_size: int) -> Translator:
        """Load the mean of these state dicts.

        Raises ConfigError if they cannot be read, do not match the model or are not finite.
        """
        states = [read_model(file) for file in files]
        model = build_model(self.config, self.corpus.vocabulary)
        state = states[0] if len(states) == 1 else mean_of(states)
        fill_model(model, state, ", ".join(map(str, files)), f"the run's model with {self.corpus.vocabulary} tokens")
        return Translator(model.to(self.device).eval(), self.corpus, search, batch_size, self.device)


def open_run(folder: Path, data: str | None = None, device: str = "cpu") -> TrainedRun:
    """Open a run folder.

    data:   the data folder; None: the run's own
    device: auto, cpu or cuda

    Raises ConfigError if the configuration, the data or the device is missing or does not match.
    """
    config = read_config(folder)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": data})})
    return TrainedRun(config, Corpus(config.data), pick_device(device))


def read_config(run: Path) -> TrainedConfig:
    """Read the configuration of a run folder. Raises ConfigError unless it is one of this task."""
    file = run / "config.yaml"
    try:
        return TrainedConfig.model_validate(OmegaConf.to_container(OmegaConf.load(file)))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read ({one_line(error)})") from error
    except ValidationError as error:
        mistakes = "; ".join(explain_mistake(item, TrainedConfig) for item in error.errors())
        raise ConfigError(f"{file}: no configuration of the transformer task: {mistakes}") from None


def mean_of(states: Sequence[State]) -> State:
    """Return the mean of several models' weights, summed in float64."""
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def pick_device(name: str) -> torch.device:
    """Return the device called auto, cpu or cuda. Raises ConfigError if a GPU is asked for and none is available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is available, expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    sys.exit(main())
