"""Parallel text, from files on disk to batches on a device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.config.config import ConfigError
from common.training.task import dealt
from common.transfer import map_ahead, to_device
from transformer.batching import Batches, Integers, TokenLimit, batch_by_tokens
from transformer.model import PAD, mask_of
from transformer.search import EOS


@dataclass(frozen=True)
class Batch:
    """Sentence pairs on one device.

    source:             [B, S] with EOS
    source_mask:        [B, 1, 1, S], or None if no source is padded
    target_input:       [B, T], the target shifted right by one token, beginning with EOS
    target:             [B, T] with EOS
    sentences:          the pairs' numbers in the split
    mean_target_tokens: mean over all training batches of an epoch, by which the training loss is divided
    """

    source: Tensor
    source_mask: Tensor | None
    target_input: Tensor
    target: Tensor
    sentences: tuple[int, ...]
    mean_target_tokens: float | None = None


class ParallelText:
    """One split: pairs of token sequences with EOS, memory-mapped.

    max_length: pairs are cut to this many tokens on each side, EOS included; None leaves them whole

    Raises ConfigError if files are missing, not in fairseq's format or of different lengths, or if there is no pair.
    """

    def __init__(self, folder: Path, split: str, source: str, target: str, max_length: int | None = None) -> None:
        from transformer.fairseq_compat import read_tokens

        pair = f"{source}-{target}"
        self._sides = [read_tokens(folder, split, pair, language) for language in (source, target)]
        self._max_length = max_length
        sizes = [len(side) for side in self._sides]
        if sizes[0] != sizes[1] or not sizes[0]:
            raise ConfigError(
                f"data.path={folder}: split {split} has {sizes[0]} {source} and {sizes[1]} {target} sentences; "
                "expected equally many, at least 1"
            )
        limit = max_length or np.iinfo(np.int64).max
        self.source_lengths, self.target_lengths = (
            np.minimum(np.asarray(side.sizes, dtype=np.int64), limit) for side in self._sides
        )

    def __len__(self) -> int:
        return len(self.source_lengths)

    @property
    def largest_token(self) -> int:
        """The largest token of both sides."""
        from transformer.fairseq_compat import largest_token

        return max(largest_token(side) for side in self._sides)

    @property
    def longest(self) -> int:
        """Number of tokens on the longest side of any pair."""
        return int(max(self.source_lengths.max(), self.target_lengths.max()))

    def target_tokens(self, sentence: int) -> Tensor:
        """Return the target of a pair with EOS, cut to max_length."""
        return self._cut(self._sides[1][int(sentence)])

    def batch(self, sentences: Integers, device: torch.device, mean_target_tokens: float | None = None) -> Batch:
        """Assemble these pairs into a batch, padded on the right."""
        sources, targets = ([self._cut(side[int(i)]) for i in sentences] for side in self._sides)
        source, target = pad(sources), pad(targets)
        target_input = torch.cat([target.new_full((len(target), 1), EOS), target[:, :-1]], dim=1)
        # Decided on the CPU: asking a GPU whether there is padding would make the CPU wait for it.
        padded = len({len(sentence) for sentence in sources}) > 1
        tensors = (source, mask_of(source) if padded else None, target_input, target)
        on_device = (None if tensor is None else to_device(tensor, device) for tensor in tensors)
        return Batch(*on_device, sentences=tuple(sentences.tolist()), mean_target_tokens=mean_target_tokens)

    def _cut(self, tokens: Tensor) -> Tensor:
        if self._max_length is None or len(tokens) <= self._max_length:
            return tokens
        return torch.cat([tokens[: self._max_length - 1], tokens[-1:]])


class TokenBatches:
    """One rank's training batches of about `budget` source and `budget` target tokens each, see `batch_by_tokens`.

    In every epoch all batches are shuffled, by (seed, epoch) and so identically on all ranks, and dealt to the ranks;
    the last few, fewer than there are ranks, are left out of that epoch. `mean_target_tokens` is the mean over all
    batches of an epoch, a constant of the data.

    Raises ConfigError if a sentence is longer than the budget, or if there are fewer batches than ranks.
    """

    def __init__(
        self,
        text: ParallelText,
        rank: int,
        ranks: int,
        budget: int,
        seed: int,
        device: torch.device,
        limit: TokenLimit = "each_side",
    ) -> None:
        self._text, self.batch_size, self._seed, self._device, self._limit = text, budget, seed, device, limit
        self._rank, self._ranks = rank, ranks
        if text.longest > budget:
            raise ConfigError(
                f"training.batch_size leaves {budget} tokens for a micro-batch of one rank, but the longest training "
                f"sentence has {text.longest}; expected a larger batch or a data.max_length of at most {budget}"
            )
        count = len(self._batches())
        self.mean_target_tokens = int(text.target_lengths.sum()) / count
        self.batches_per_epoch, self.steps_per_epoch = count, count // ranks
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"training.batch_size: {ranks} ranks take {budget} tokens each, but there are only {count} such "
                "batches; expected a smaller batch"
            )

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Batch]:
        """Return this rank's batches of the epoch from number `start` on, after the first `offset` of all ranks."""
        generator = np.random.default_rng((self._seed, epoch))
        batches = self._batches(generator)
        numbers = dealt(len(batches), self._rank, self._ranks, start, offset)
        chosen = generator.permutation(len(batches))[numbers]
        return load(self._text, batches, chosen.tolist(), self._device, self.mean_target_tokens)

    def _batches(self, generator: np.random.Generator | None = None) -> Batches:
        lengths = (self._text.source_lengths, self._text.target_lengths)
        return batch_by_tokens(*lengths, self.batch_size, generator, self._limit)


def evaluation_batches(
    text: ParallelText, shard: int, shards: int, budget: int, device: torch.device
) -> Iterator[Batch]:
    """Return one shard's batches of about `budget` tokens; every pair is in exactly one shard."""
    batches = batch_by_tokens(text.source_lengths, text.target_lengths, budget)
    return load(text, batches, range(shard, len(batches), shards), device)


def load(
    text: ParallelText,
    batches: Batches,
    chosen: Iterable[int],
    device: torch.device,
    mean_target_tokens: float | None = None,
) -> Iterator[Batch]:
    """Load the chosen batches; for a GPU, a thread assembles them ahead while it computes."""

    def one(index: int) -> Batch:
        return text.batch(batches[index], device, mean_target_tokens)

    return map_ahead(one, chosen, device)


def pad(sentences: list[Tensor]) -> Tensor:
    """Stack sequences of different lengths to [B, longest], with PAD on the right."""
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
