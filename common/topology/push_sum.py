"""Push-sum: how graphs that do not keep the mean of x still give consensus on it (Assran et al., ICML 2019).

W(t) has columns that sum to 1 and rows that need not. Beside x every worker has a weight w, mixed alike, w(0) = 1:

    x(t+1) = W(t) x(t),   w(t+1) = W(t) w(t),   z = x / w

z_i converges to the mean of x(0). The weights are a function of the schedule alone, so no worker needs to send its own;
and z mixes by itself, with the row-stochastic matrix diag(w(t+1))^-1 W(t) diag(w(t)).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from common.topology.round import TOLERANCE, Round
from common.topology.topology import Topology

REMEMBERED = 8  # weights of the last clocks: in a step several parts ask for neighbouring ones


@dataclass(frozen=True)
class DebiasedRound(Round):
    """One step of z: rows sum to 1, columns need not. ValueError when they do not."""

    def __post_init__(self) -> None:
        rows = self._checked_rows()
        object.__setattr__(self, "weights", rows)
        for i, row in enumerate(rows):
            if abs(sum(row.values()) - 1) > TOLERANCE:
                raise ValueError(f"DebiasedRound.weights: row {i}: expected a sum of 1, got {sum(row.values()):.12g}")

    def __hash__(self) -> int:
        return super().__hash__()

    @property
    def doubly_stochastic(self) -> bool:
        """False: z alone does not keep its mean."""
        return False

    def __reduce__(self) -> tuple:
        return DebiasedRound, (tuple(dict(row) for row in self.weights),)


class PushSum:
    """The schedule of z under `topology`; a RandomSchedule, as its rounds have no period (they tend to one)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.world_size = topology.world_size
        self._known = {0: np.ones(topology.world_size)}  # w by clock, without gaps

    def weights(self, t: int) -> np.ndarray:
        """Return w(t), float64 [n], of sum n. Takes one mixing for each clock after the latest that was asked for."""
        if t not in self._known and t < max(self._known):
            self._known = {0: np.ones(self.world_size)}
        while t not in self._known:
            latest = max(self._known)
            self._known[latest + 1] = mixed(self.topology.round(latest), self._known[latest])
            if len(self._known) > REMEMBERED:
                del self._known[min(self._known)]
        return self._known[t]

    def __call__(self, t: int) -> Round:
        """Return the round of z at step t."""
        now, after = self.weights(t), self.weights(t + 1)
        rows: list[Mapping[int, float]] = [
            {j: weight * now[j] / after[i] for j, weight in row.items()}
            for i, row in enumerate(self.topology.round(t).weights)
        ]
        return DebiasedRound(tuple(rows))

    def contraction(self) -> float:
        """Return the contraction of the disagreement in a round, as of `topology.spectral_gap`."""
        return 1 - self.topology.spectral_gap()


def mixed(round_: Round, w: np.ndarray) -> np.ndarray:
    """Return W w, float64 [n]."""
    return np.array([sum(weight * w[j] for j, weight in row.items()) for row in round_.weights])


def push_sum(topology: Topology) -> Topology:
    """Return the topology of z; `topology` itself where all weights stay 1, because rows sum to 1 as columns do."""
    if topology.doubly_stochastic:
        return topology
    name, size = f"{topology.name}_push_sum", topology.workers_per_host
    return Topology(name, topology.world_size, size, topology.options, schedule=PushSum(topology))


def weights_of(topology: Topology, t: int) -> np.ndarray:
    """Return w(t) [n] of a topology that `push_sum` returned."""
    schedule = topology.schedule
    return schedule.weights(t) if isinstance(schedule, PushSum) else np.ones(topology.world_size)
