"""Batches of sentences of similar length, limited by their numbers of source and target tokens.

Everything here depends on lengths alone, in tokens with EOS, and is the same on every rank.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Batches:
    """A division into batches: batch k holds sentences order[starts[k]:starts[k + 1]]."""

    order: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Integers:
        """Return the sentences of batch `index`."""
        return self.order[self.starts[index] : self.starts[index + 1]]


def batch_by_tokens(
    sources: Integers, targets: Integers, budget: int, generator: np.random.Generator | None = None
) -> Batches:
    """Sort sentences by source and target length and cut them into non-empty batches.

    No batch has more than `budget` source tokens or `budget` target tokens, padding not counted; a longer sentence is
    a batch by itself. With a generator, sentences of equal lengths are shuffled, so that batches differ between epochs
    while their number and sizes stay the same.
    """
    sentences = np.arange(len(sources)) if generator is None else generator.permutation(len(sources))
    # lexsort sorts by its last key first; it is stable, so equal lengths stay in shuffled order.
    order = sentences[np.lexsort((targets[sentences], sources[sentences]))]
    tokens = [np.concatenate([[0], np.cumsum(lengths[order])]) for lengths in (sources, targets)]
    starts = [0]
    while starts[-1] < len(order):
        first = starts[-1]
        fit = min(int(np.searchsorted(total, total[first] + budget, side="right")) - 1 for total in tokens)
        starts.append(max(first + 1, fit))
    return Batches(order, np.array(starts, dtype=np.int64))
