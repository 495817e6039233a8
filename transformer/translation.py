"""Translating with a trained model, loaded from a run folder or a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from torch import Tensor
from yaml import YAMLError

from common.cli import one_line
from common.config.config import ConfigError
from common.config.overrides import flatten
from common.launch.compose import explain
from common.record.checkpoint import fill_model
from transformer.batching import batch_by_tokens
from transformer.config import TrainedConfig
from transformer.corpus import Corpus
from transformer.data import ParallelText, evaluation_batches, pad
from transformer.model import Transformer, mask_of
from transformer.search import Hypothesis, Search, beam_search
from transformer.task import build_model

State = dict[str, Tensor]


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


def read_config(run: Path) -> TrainedConfig:
    """Read the configuration of a run folder. Raises ConfigError unless it is one of this task."""
    file = run / "config.yaml"
    try:
        values = OmegaConf.to_container(OmegaConf.load(file))
        return TrainedConfig.model_validate(values)
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read ({one_line(error)})") from error
    except ValidationError as error:
        raise ConfigError(
            f"{file}: no configuration of the transformer task: {explain(error, flatten(values))}"
        ) from None


def mean_of(states: Sequence[State]) -> State:
    """Return the mean of several models' weights, summed in float64."""
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def load_model(config: TrainedConfig, corpus: Corpus, state: State, name: str, device: torch.device) -> Transformer:
    """Build the configured model with these weights, in evaluation mode.

    Raises ConfigError naming `name` if the weights do not match the model, or are not finite.
    """
    model = build_model(config, corpus.vocabulary)
    fill_model(model, state, name, f"the run's model with {corpus.vocabulary} tokens")
    return model.to(device).eval()


def with_data(config: TrainedConfig, path: str | None) -> TrainedConfig:
    """Return the configuration with its data in another folder, or unchanged if `path` is None."""
    return config if path is None else config.model_copy(update={"data": config.data.model_copy(update={"path": path})})


def pick_device(name: str) -> torch.device:
    """Return the device called auto, cpu or cuda. Raises ConfigError if a GPU is asked for and none is available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is available, expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
