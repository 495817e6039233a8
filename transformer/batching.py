"""Batches of sentences of similar length, limited by their numbers of source and target tokens.

Everything here depends on lengths alone, in tokens with EOS, and is the same on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
TokenLimit = Literal["each_side", "both_sides"]
LEAST_FILLED = 0.35  # least share of a side that is not padding, with limit="both_sides"


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
    sources: Integers,
    targets: Integers,
    budget: int,
    generator: np.random.Generator | None = None,
    limit: TokenLimit = "each_side",
) -> Batches:
    """Sort sentences by length and cut them into non-empty batches.

    limit: each_side:  sorted by source, then target length; no batch has more than `budget` source tokens or `budget`
                       target tokens
           both_sides: as in the code of arXiv 2410.11998 (transformer/src/data/sampler.py): sorted by the sum of both
                       lengths; no batch has more than 2 x `budget` tokens on both sides together, and each side is
                       filled to 35 % at least, the rest being padding

    Padding does not count as tokens; a longer sentence is a batch on its own. With a generator, sentences of equal
    lengths are shuffled, so that batches differ between epochs while their number and sizes stay the same.
    """
    sentences = np.arange(len(sources)) if generator is None else generator.permutation(len(sources))
    both = sources + targets
    keys = (targets, sources) if limit == "each_side" else (targets, sources, both)
    # lexsort sorts by its last key first; it is stable, so equal lengths stay in shuffled order.
    order = sentences[np.lexsort([lengths[sentences] for lengths in keys])]
    limits = [(sources, budget), (targets, budget)] if limit == "each_side" else [(both, 2 * budget)]
    totals = [(np.concatenate([[0], np.cumsum(lengths[order])]), most) for lengths, most in limits]
    starts = [0]
    while starts[-1] < len(order):
        first = starts[-1]
        end = min(int(np.searchsorted(total, total[first] + most, side="right")) - 1 for total, most in totals)
        if limit == "both_sides":
            end = first + well_filled(lengths[order[first:end]] for lengths in (sources, targets))
        starts.append(max(first + 1, end))
    return Batches(order, np.array(starts, dtype=np.int64))


def well_filled(sides: Iterable[Integers]) -> int:
    """Return how many leading sentences fit before padding makes a side more than 1 / LEAST_FILLED times as long."""
    counts = []
    for lengths in sides:
        padded = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        too_empty = np.cumsum(lengths) < LEAST_FILLED * padded
        counts.append(int(too_empty.argmax()) if too_empty.any() else len(lengths))
    return min(counts)
