"""Several schedules of one topology that run at the same time, each on a part of the parameters."""

import dataclasses

import numpy as np

from common.topology.round import Round
from common.topology.topology import Topology

PHASES = ("aligned", "staggered")


def staggered(topology: Topology) -> Topology:
    """Return the same topology with the rounds 2k and 2k+1 of its period swapped (the last one of an odd period stays).

    Mixing acts on each coordinate alone, so half of the parameters may follow this schedule while the other half
    follows `topology`. Under the alternating exponential ring (arXiv 2410.11998) every host then sends half of its
    parameters in each step, instead of all of them in every second one. The rounds that are swapped must commute:
    then a period mixes as before. With a period of two rounds they need not: the two then only take turns one step
    later.

    Raises ValueError for random schedules, and where two such rounds of a longer period do not commute.
    """
    if topology.period is None:
        raise ValueError(
            f"phases='staggered': topology {topology.name!r} is random, there are no rounds to swap; use 'aligned'"
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
    """Try both orders on a random vector, which matrices that differ change differently with probability 1."""
    x = np.random.default_rng(0).standard_normal(first.world_size)
    return np.allclose(_mixed(first, _mixed(second, x)), _mixed(second, _mixed(first, x)), rtol=0, atol=1e-9)


def _mixed(round_: Round, x: np.ndarray) -> np.ndarray:
    return np.array([sum(weight * x[j] for j, weight in row.items()) for row in round_.weights])


def in_phases(topology: Topology, phases: str) -> tuple[Topology, ...]:
    """Return the schedules that take turns among the buckets: one if "aligned", two if "staggered".

    Raises ValueError for another name, or where `staggered` does.
    """
    if phases not in PHASES:
        raise ValueError(f"phases={phases!r}: expected one of {', '.join(PHASES)}")
    return (topology,) if phases == "aligned" else (topology, staggered(topology))
