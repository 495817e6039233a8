"""Every topology with every small number of workers for which it exists."""

from functools import cache

import numpy as np

from common.topology import NAMES, Topology, build

SIZES = (*range(1, 14), 16, 17, 24, 32, 33)


def is_power_of_two(n):
    return n.bit_count() == 1


@cache
def cached(name, n, workers_per_host=1, **options) -> Topology:
    return build(name, n, workers_per_host, **options)


FAMILIES = [name for name in NAMES if name != "file"]


def sizes_of(name) -> list[int]:
    """Return those of SIZES for which the family exists."""
    return [n for n in SIZES if name not in ("hypercube", "aer") or is_power_of_two(n)]


def product(topology, start, count):
    """W(start + count - 1) ... W(start), by the definition of the schedule."""
    P = np.eye(topology.world_size)
    for t in range(start, start + count):
        P = topology.matrix(t) @ P
    return P


def distance_from_average(P):
    return np.abs(P - 1 / len(P)).max()
