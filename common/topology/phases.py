"""Several schedules of one topology that run at the same time, each on a part of the parameters."""

import dataclasses

import numpy as np

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
        first, second = rounds[t].matrix(), rounds[t + 1].matrix()
        if len(rounds) > 2 and not np.allclose(first @ second, second @ first, atol=1e-9):
            raise ValueError(
                f"phases='staggered': rounds {t} and {t + 1} of topology {topology.name!r} do not commute, swapping "
                "them would mix otherwise; use 'aligned'"
            )
        rounds[t : t + 2] = rounds[t + 1], rounds[t]
    return dataclasses.replace(topology, name=f"{topology.name}_staggered", schedule=tuple(rounds))


def in_phases(topology: Topology, phases: str) -> tuple[Topology, ...]:
    """Return the schedules that take turns among the buckets: one if "aligned", two if "staggered".

    Raises ValueError for another name, or where `staggered` does.
    """
    if phases not in PHASES:
        raise ValueError(f"phases={phases!r}: expected one of {', '.join(PHASES)}")
    return (topology,) if phases == "aligned" else (topology, staggered(topology))
