"""How the compute times of one worker vary from step to step: what is emulated and what is predicted draw alike."""

from collections.abc import Sequence

import numpy as np


class Variation:
    """Compute times of a worker, as multiples of the usual one; equal seeds give equal times.

    jitter:       standard deviation of their logarithm (lognormal, the mean is 1)
    stall_share:  share of the steps that stall, each on its own
    stall_factor: how many times longer these take
    factor:       of all steps
    seed:         such as (seed, worker)
    """

    def __init__(
        self,
        jitter: float = 0.0,
        stall_share: float = 0.0,
        stall_factor: float = 1.0,
        factor: float = 1.0,
        *,
        seed: Sequence[int],
    ) -> None:
        self._jitter, self._factor = jitter, factor
        self._stall_share, self._stall_factor = stall_share, stall_factor
        # Of their own, so that many steps at once draw what as many single steps draw.
        self._normal, self._uniform = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))

    def draw(self, steps: int = 1) -> np.ndarray:
        """Return the multiples of the next steps, [steps]."""
        times = self._factor * np.exp(self._jitter * self._normal.standard_normal(steps) - self._jitter**2 / 2)
        times[self._uniform.random(steps) < self._stall_share] *= self._stall_factor
        return times
