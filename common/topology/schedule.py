"""Schedules made from other schedules: with idle rounds, between hosts, in phases, and for push-sum's ratio.

With push-sum, graphs that do not keep the mean of x still reach consensus on it (Assran et al., ICML 2019). The columns
of W(t) sum to 1, its rows need not. Besides x every worker has a weight w, mixed in the same way, with w(0) = 1:

    x(t+1) = W(t) x(t),   w(t+1) = W(t) w(t),   z = x / w

z_i converges to the mean of x(0). The weights depend on the schedule alone, so no worker needs to send its weight, and
z itself is mixed with the row-stochastic matrix diag(w(t+1))^-1 W(t) diag(w(t)).
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from common.topology.round import TOLERANCE, Round
from common.topology.topology import RandomSchedule, Schedule, Topology

PHASES = ("aligned", "staggered")
REMEMBERED = 8  # clocks whose weights are kept: in a step several parts ask for neighbouring clocks


@dataclass(frozen=True)
class _RandomSpread:
    """The random schedule that `spread` returns."""

    schedule: RandomSchedule
    workers_per_host: int
    idle_rounds: int

    @property
    def world_size(self) -> int:
        return self.schedule.world_size * self.workers_per_host

    def __call__(self, t: int) -> Round:
        drawn, idle = divmod(t, 1 + self.idle_rounds)
        return Round.idle(self.world_size) if idle else self.schedule(drawn).on_hosts(self.workers_per_host)

    def contraction(self) -> float:
        # Disagreement inside a host is gone at once.
        return self.schedule.contraction() ** (1 / (1 + self.idle_rounds))


def spread(schedule: Schedule, workers_per_host: int, idle_rounds: int) -> Schedule:
    """Return the schedule of workers whose hosts average inside and then mix as `schedule` says.

    idle_rounds: number of rounds without communication after each of its rounds
    """
    if not isinstance(schedule, tuple):
        return _RandomSpread(schedule, workers_per_host, idle_rounds)
    rounds = [round_.on_hosts(workers_per_host) for round_ in schedule]
    idle = (Round.idle(rounds[0].world_size),) * idle_rounds
    return tuple(round_ for mixing in rounds for round_ in (mixing, *idle))


def in_phases(topology: Topology, phases: str) -> tuple[Topology, ...]:
    """Return the schedules that alternate over the buckets: one if "aligned", two if "staggered".

    Raises ValueError for another name, or where `staggered` does.
    """
    if phases not in PHASES:
        raise ValueError(f"phases={phases!r}: expected one of {', '.join(PHASES)}")
    return (topology,) if phases == "aligned" else (topology, staggered(topology))


def staggered(topology: Topology) -> Topology:
    """Return the same topology with the rounds 2k and 2k+1 of its period swapped (the last one of an odd period stays).

    Mixing acts on each coordinate alone, so half of the parameters may follow this schedule while the other half
    follows `topology`. Under the alternating exponential ring (arXiv 2410.11998) every host then sends half of its
    parameters in each step, instead of all of them in every second one. The rounds that are swapped must commute, so
    that a period mixes as before. With a period of two rounds they need not: swapping then only shifts the schedule by
    one step.

    Raises ValueError for random schedules, and where two such rounds of a longer period do not commute.
    """
    if topology.period is None:
        raise ValueError(
            f"phases='staggered': topology {topology.name!r} has no period (random, or with push-sum); use 'aligned'"
        )
    rounds = list(topology.schedule)
    for t in range(0, len(rounds) - 1, 2):
        if len(rounds) > 2 and not _commute(rounds[t], rounds[t + 1]):
            raise ValueError(
                f"phases='staggered': rounds {t} and {t + 1} of topology {topology.name!r} do not commute, swapping "
                "them would mix otherwise; use 'aligned'"
            )
        rounds[t : t + 2] = rounds[t + 1], rounds[t]
    return dataclasses.replace(topology, name=f"{topology.name}_staggered", schedule=tuple(rounds))


def _commute(first: Round, second: Round) -> bool:
    """Try both orders on a random vector: matrices that differ give different results with probability 1."""
    x = np.random.default_rng(0).standard_normal(first.world_size)
    return np.allclose(mixed(first, mixed(second, x)), mixed(second, mixed(first, x)), rtol=0, atol=1e-9)


def mixed(round_: Round, x: np.ndarray) -> np.ndarray:
    """Return W x, float64 [n]."""
    return np.array([sum(weight * x[j] for j, weight in row.items()) for row in round_.weights])


class DebiasedRound(Round):
    """One step of z: rows sum to 1, columns need not. Raises ValueError if a row does not."""

    def __post_init__(self) -> None:
        rows = self._checked_rows()
        object.__setattr__(self, "weights", rows)
        for i, row in enumerate(rows):
            if abs(sum(row.values()) - 1) > TOLERANCE:
                raise ValueError(f"DebiasedRound.weights: row {i}: expected a sum of 1, got {sum(row.values()):.12g}")

    @property
    def doubly_stochastic(self) -> bool:
        """False: z alone does not keep its mean."""
        return False


class PushSum:
    """The schedule of z under `topology`; a RandomSchedule, because its rounds only approach a period."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.world_size = topology.world_size
        self._known = {0: np.ones(topology.world_size)}  # w by clock, without gaps

    def weights(self, t: int) -> np.ndarray:
        """Return w(t), float64 [n], which sums to n. Costs one mixing for each clock since the latest one computed."""
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
        rows = enumerate(self.topology.round(t).weights)
        return DebiasedRound(tuple({j: weight * now[j] / after[i] for j, weight in row.items()} for i, row in rows))

    def contraction(self) -> float:
        """Return the contraction of the disagreement per round, according to `topology.spectral_gap`."""
        return 1 - self.topology.spectral_gap()


def push_sum(topology: Topology) -> Topology:
    """Return the topology of z; `topology` itself if all weights stay 1, because its rows sum to 1 too."""
    if topology.doubly_stochastic:
        return topology
    name, size = f"{topology.name}_push_sum", topology.workers_per_host
    return Topology(name, topology.world_size, size, topology.options, schedule=PushSum(topology))


def weights_of(topology: Topology, t: int) -> np.ndarray:
    """Return w(t) [n] of a topology that `push_sum` returned."""
    schedule = topology.schedule
    return schedule.weights(t) if isinstance(schedule, PushSum) else np.ones(topology.world_size)
