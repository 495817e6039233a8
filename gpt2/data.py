"""Windows of tokens for training and evaluation, read from the memory map on demand."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.training.task import dealt
from common.transfer import map_ahead, to_device
from gpt2.token_files import DataError

Tokens = NDArray[np.uint16]


class Windows:
    """One rank's random training windows, [batch_size, context + 1] int64: inputs, and targets one token later.

    Sample s of a stream of random numbers decides where window s begins. With shard="global" there is one stream, keyed
    by the seed, and consecutive samples are dealt to the ranks in local batches: the windows of an update are the same
    for any number of ranks and micro-batches. With "independent" each rank has its own stream, keyed by (seed, rank);
    with "contiguous" it also draws from its own part of the tokens, one of `ranks` equal, adjacent parts. A batch is
    always a function of (seed, rank, ranks, batch number), so a resumed run needs nothing but that number. Once workers
    leave or join, the streams of "independent" and "contiguous" are keyed by the number of ranks, too: batch numbers
    depend on it, and batches could be repeated otherwise.

    first_ranks: the number of ranks with which the run began, whose streams are keyed as above

    An epoch has as many windows as fit side by side into the file, although random windows do not cover it.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        vocabulary: int,
        batch_size: int,
        rank: int,
        ranks: int,
        seed: int,
        shard: str,
        device: torch.device,
        first_ranks: int,
    ) -> None:
        self._tokens, self._context, self._vocabulary = tokens, context, vocabulary
        self.batch_size, self._device = batch_size, device
        shared = shard == "global"
        self._key = seed if shared else seed + ((rank + 1) << 64)  # Philox keys have 128 bits
        self._region = 0 if shared or ranks == first_ranks else ranks << 64  # of Philox' counter, which has 256 bits
        self._rank, self._ranks, self._shared = rank, ranks, shared
        part, parts = (rank, ranks) if shard == "contiguous" else (0, 1)
        self._first = part * (len(tokens) // parts)
        self._places = len(tokens) // parts - context  # where a window of this rank may begin, from the first on
        self.steps_per_epoch = max(1, len(tokens) // (context * batch_size * ranks))
        self.batches_per_epoch = self.steps_per_epoch * ranks  # epochs follow on each other without a gap

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Tensor]:
        """Return this rank's batches of the epoch from number `start` on, after the first `offset` of all ranks.

        Raises DataError for tokens outside the vocabulary.
        """
        first = epoch * self.batches_per_epoch

        def batch(number: int) -> Tensor:
            sample = ((first + number) if self._shared else (first + number) // self._ranks) * self.batch_size
            windows = cut(self._tokens, self.starts(sample), self._context, self._vocabulary)
            return to_device(windows, self._device)

        return map_ahead(batch, dealt(self.batches_per_epoch, self._rank, self._ranks, start, offset), self._device)

    def starts(self, sample: int) -> NDArray[np.int64]:
        """Return where the windows of samples `sample`, `sample` + 1, ... begin, [batch_size]."""
        return self._first + _random_starts(self._key, self._region + sample, self.batch_size, self._places)


def _random_starts(key: int, counter: int, count: int, below: int) -> NDArray[np.int64]:
    """Return `count` random integers from 0 to below - 1, a function of the arguments."""
    # One step of Philox's counter gives four 64-bit numbers; each sample uses one step.
    raw = np.random.Philox(key=key, counter=counter).random_raw(4 * count)[::4]
    return (raw % np.uint64(below)).astype(np.int64)


def evaluation_starts(length: int, context: int, windows: int | None) -> list[int]:
    """Return where evaluation windows begin in a split of `length` tokens: fixed and evenly spread.

    windows: how many, at most as many as with None, which covers the split side by side and predicts each token once
             (the last window may be shorter)
    """
    predicted = length - 1
    side_by_side = -(-predicted // context)
    if windows is None or windows >= side_by_side:
        return list(range(0, predicted, context))
    return [round(i * (predicted - context) / max(1, windows - 1)) for i in range(windows)]


def drawn_starts(length: int, context: int, windows: int, seed: int, split: int, step: int) -> list[int]:
    """Return where the windows drawn for the evaluation after `step` begin in a split of `length` tokens.

    split: its number; each split has its own stream, separate from the training streams
    """
    key = seed + ((2**63 + split) << 64)  # training uses the keys of ranks
    return _random_starts(key, step << 64, windows, length - context).tolist()


def evaluation_batches(
    tokens: Tokens, starts: list[int], context: int, vocabulary: int, batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Return the windows at `starts` in batches of up to `batch_size`; a shorter last window comes alone."""
    full = [start for start in starts if start + context < len(tokens)]
    groups = [full[first : first + batch_size] for first in range(0, len(full), batch_size)]
    groups += [[start] for start in starts if start + context >= len(tokens)]

    def batch(group: list[int]) -> Tensor:
        return to_device(cut(tokens, group, min(context, len(tokens) - 1 - group[0]), vocabulary), device)

    return map_ahead(batch, groups, device)


def cut(tokens: Tokens, starts: list[int] | NDArray[np.int64], context: int, vocabulary: int) -> Tensor:
    """Cut windows [len(starts), context + 1] int64. Raises DataError for tokens outside the vocabulary."""
    windows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    largest = windows.max()
    if largest >= vocabulary:  # on a GPU this would be an assertion without a message
        row, column = np.argwhere(windows == largest)[0]
        raise DataError(
            f"token {largest} at position {starts[row] + column}, expected less than model.vocabulary={vocabulary}: "
            "the file is damaged"
        )
    return torch.from_numpy(windows)
