"""Random pairs, drawn anew in every round."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.arguments import integer
from common.topology.round import Round


@dataclass(frozen=True)
class RandomMatching:
    """Uniformly random perfect matchings of n workers, weight 1/2; with odd n one random worker idles."""

    world_size: int
    seed: int

    def __call__(self, t: int) -> Round:
        """Return round t, a function of (n, seed, t) alone."""
        return _matching(self.world_size, self.seed, t)

    def contraction(self) -> float:
        """Return sqrt(lambda_2(E[W^T W])), the root mean square contraction of one round.

        W averages pairs, a projection, so W^T W = W. E[W] has equal entries off its diagonal, half the chance
        of a given pair, which is 1/(n-1) for even n and 1/n for odd n.
        """
        n = self.world_size
        second = 0.5 if n % 2 else (n - 2) / (2 * (n - 1))
        return second**0.5


def schedule(n: int, *, seed: int = 0) -> RandomMatching:
    """Return the random matchings of `seed`, an integer >= 0."""
    return RandomMatching(n, integer("topology 'random_matching': seed", seed, minimum=0))


@lru_cache(maxsize=16)  # those of a step: its buckets and fragments ask for the same few; a round takes memory
def _matching(n: int, seed: int, t: int) -> Round:
    # RandomState, not Generator: its stream is frozen (NEP 19), so all workers agree whatever their numpy.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, t]))).permutation(n).tolist()
    return Round.from_groups(zip(order[: n // 2], order[n // 2 :], strict=False), n)
