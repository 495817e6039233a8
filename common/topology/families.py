"""Topologies by name: a function for each, which returns its schedule, and `build`, which checks the arguments.

Functions take n >= 2 workers and their options as keywords; FAMILIES lists the options with their defaults.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from common.arguments import did_you_mean, flag, integer
from common.topology.base_k import base_k
from common.topology.edge_list import edge_list
from common.topology.round import MOST_WORKERS, Round
from common.topology.schedule import spread
from common.topology.topology import Schedule, Topology

MOST_IDLE = 10**6  # a period is a list of its rounds


def complete(n: int) -> tuple[Round, ...]:
    """Return W = J/n: one round of exact averaging, as an all-reduce computes it."""
    return (Round.from_groups([range(n)], n),)


def ring(n: int) -> tuple[Round, ...]:
    """Return the static bidirectional ring: weight 1/3 for the worker itself and each neighbour (1/2 if n = 2).

    |lambda_2| = 1/3 + 2/3 cos(2 pi / n) for n >= 4 (arXiv 2110.13363); for n <= 3 it is the complete graph.
    """
    return (_uniform([{(i - 1) % n, i, (i + 1) % n} for i in range(n)]),)


def one_peer_ring(n: int) -> tuple[Round, ...]:
    """Return the pairings (t, t+1), (t+2, t+3), ... mod n of round t, weight 1/2.

    Even n: two perfect matchings alternate, each worker turning to its right and left neighbour (a single one
    for n = 2, where both are the same). Odd n: no perfect matching exists, so worker t-1 idles in round t; over
    a period of n rounds each worker idles once, each edge is used equally often, and successive rounds share no
    edge.
    """
    period = n if n % 2 else min(n // 2, 2)
    return tuple(
        Round.from_groups([((t + 2 * m) % n, (t + 2 * m + 1) % n) for m in range(n // 2)], n) for t in range(period)
    )


def static_exponential(n: int) -> tuple[Round, ...]:
    """Return the static exponential graph of Ying et al. (NeurIPS 2021, arXiv 2110.13363).

    Directed: worker i takes from (i + 2^k) mod n for k = 0..ceil(log2 n)-1 and from itself, each with weight
    1/(ceil(log2 n)+1). The spectral gap is 2/(1+ceil(log2 n)) for even n and larger for odd n > 2.
    """
    hops = (n - 1).bit_length()  # ceil(log2 n)
    # 0 < 2^k < n for all k: the peers are distinct and none is i itself, so no two weights coincide.
    offsets = [0] + [2**k for k in range(hops)]
    return (Round(tuple({(i + offset) % n: 1 / (hops + 1) for offset in offsets} for i in range(n))),)


def one_peer_exponential(n: int) -> tuple[Round, ...]:
    """Return the one-peer exponential graph of Ying et al. (NeurIPS 2021, arXiv 2110.13363).

    Directed: in round k = t mod ceil(log2 n) worker i takes from worker (i + 2^k) mod n with weight 1/2 and gives to
    (i - 2^k) mod n. Works for any n; if n is a power of two, any log2 n successive rounds average exactly.
    """
    hops = (n - 1).bit_length()  # ceil(log2 n)
    return tuple(Round(tuple({i: 0.5, (i + 2**k) % n: 0.5} for i in range(n))) for k in range(hops))


def hypercube(n: int) -> tuple[Round, ...]:
    """Return the pairings i <-> i XOR 2^k of rounds k = 0..log2(n)-1, weight 1/2: exact after log2 n rounds.

    Raises ValueError unless n is a power of two.
    """
    if n & (n - 1):
        raise ValueError(
            f"topology 'hypercube': world_size: expected a power of two, got {n}; for other sizes use base_k "
            "(pairs too, exact averaging for every world size) or one_peer_exponential (directed)"
        )
    return tuple(
        Round.from_groups([(i, i ^ 2**k) for i in range(n) if not i & 2**k], n) for k in range(n.bit_length() - 1)
    )


def aer(n: int, *, workers_per_host: int) -> tuple[Round, ...]:
    """Return the alternating exponential ring of Wang et al. (ICLR 2025, arXiv 2410.11998) for H hosts.

    Two rounds for each distance 2^k, k = 0..log2(H)-1, at which the hosts fall into H/2 pairs. In one of the
    two rounds a pair averages over all its workers, in the other each of its hosts averages inside, and
    neighbouring pairs take turns. As in the authors' code, the numbering of pairs continues from one distance
    to the next, and even-numbered pairs cross in the second of the two rounds. Weights are uniform in every
    group.

    One cycle of 2 log2 H rounds averages exactly. A single host averages completely in every round.

    Raises ValueError when workers_per_host does not divide n or the number of hosts is not a power of two.
    """
    if n % workers_per_host:
        raise ValueError(
            f"topology 'aer': workers_per_host: expected a divisor of world_size={n}, got {workers_per_host}"
        )
    hosts = [tuple(range(first, first + workers_per_host)) for first in range(0, n, workers_per_host)]
    if len(hosts) & (len(hosts) - 1):
        raise ValueError(
            "topology 'aer': number of hosts (world_size / workers_per_host): expected a power of two "
            f"(1, 2, 4, 8, ...), got {n} / {workers_per_host} = {len(hosts)}; for other numbers use base_k "
            "(exact averaging for every world size) or one_peer_exponential"
        )
    if len(hosts) == 1:
        return (Round.from_groups(hosts, n),)
    rounds = []
    count = 0
    for k in range(len(hosts).bit_length() - 1):
        halves: tuple[list, list] = ([], [])
        for h in range(len(hosts)):
            if h & 2**k:
                continue  # the partner of an earlier host
            crossing, inside = (halves[1], halves[0]) if count % 2 == 0 else halves
            crossing.append(hosts[h] + hosts[h ^ 2**k])
            inside += [hosts[h], hosts[h ^ 2**k]]
            count += 1
        rounds += [Round.from_groups(half, n) for half in halves]
    return tuple(rounds)


def torus(n: int, *, rows: int | None, cols: int | None) -> tuple[Round, ...]:
    """Return the static torus; worker r * cols + c sits at row r, column c.

    Weights are uniform over the worker itself and its distinct neighbours above, below, left and right: 1/5
    usually, more where a dimension of 1 or 2 makes some of them coincide. Without `rows` and `cols` the most
    square factorisation is used; a prime n thus gives 1 x n, the ring.

    Raises ValueError when rows * cols is not n.
    """
    rows, cols = _rows_and_columns("torus", n, rows, cols)
    neighbourhoods = []
    for i in range(n):
        r, c = divmod(i, cols)
        around = [(r, c), (r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
        neighbourhoods.append({(row % rows) * cols + col % cols for row, col in around})
    return (_uniform(neighbourhoods),)


def grid(n: int, *, rows: int | None, cols: int | None) -> tuple[Round, ...]:
    """Return the static grid, without wrap-around; worker r * cols + c sits at row r, column c.

    An edge between i and j weighs 1 / (1 + max(degree of i, degree of j)), the Metropolis-Hastings rule, and each
    worker keeps the rest: symmetric and doubly stochastic. Graph, weights and the default shape (the most square one
    with rows <= cols) follow BlueFog's MeshGrid2DGraph, the only grid in the library with which arXiv 2110.13363
    measured its "grid". A prime n gives a path.

    Raises ValueError when rows * cols is not n.
    """
    rows, cols = _rows_and_columns("grid", n, rows, cols)
    neighbours = []
    for i in range(n):
        r, c = divmod(i, cols)
        around = [(r - 1, c), (r, c - 1), (r, c + 1), (r + 1, c)]
        neighbours.append([row * cols + col for row, col in around if 0 <= row < rows and 0 <= col < cols])
    weights = []
    for i, around in enumerate(neighbours):
        given = {j: 1 / (1 + max(len(around), len(neighbours[j]))) for j in around}
        kept = 1 - sum(given.values())
        weights.append(given | ({i: kept} if kept > 0 else {}))
    return (Round(tuple(weights)),)


def star(n: int) -> tuple[Round, ...]:
    """Return the static star with Metropolis weights 1/n on every edge, hence doubly stochastic.

    Worker 0 averages over all; every other worker keeps (n-1)/n of its value. lambda_2 = 1 - 1/n.
    """
    hub = dict.fromkeys(range(n), 1 / n)
    return (Round((hub, *({0: 1 / n, i: 1 - 1 / n} for i in range(1, n)))),)


@dataclass(frozen=True)
class RandomMatching:
    """Uniformly random perfect matchings of n workers, weight 1/2; with odd n one random worker idles.

    Round t is a function of (n, seed, t) alone.
    """

    world_size: int
    seed: int

    def __call__(self, t: int) -> Round:
        """Return round t."""
        return _matching(self.world_size, self.seed, t)

    def contraction(self) -> float:
        """Return sqrt(lambda_2(E[W^T W])), the root mean square contraction of one round.

        W averages pairs, which is a projection, so W^T W = W. Every off-diagonal entry of E[W] is half the
        probability of a given pair, which is 1/(n-1) for even n and 1/n for odd n.
        """
        n = self.world_size
        second = 0.5 if n % 2 else (n - 2) / (2 * (n - 1))
        return second**0.5


def random_matching(n: int, *, seed: int) -> RandomMatching:
    """Return the random matchings of `seed`, an integer >= 0."""
    return RandomMatching(n, integer("topology 'random_matching': seed", seed, minimum=0))


# Each topology's function, and its options with their defaults; REQUIRED marks an option without a default.
REQUIRED = object()
FAMILIES: dict[str, tuple[Callable[..., Schedule], dict[str, Any]]] = {
    "complete": (complete, {}),
    "ring": (ring, {}),
    "one_peer_ring": (one_peer_ring, {}),
    "static_exponential": (static_exponential, {}),
    "one_peer_exponential": (one_peer_exponential, {}),
    "hypercube": (hypercube, {}),
    "aer": (aer, {}),
    "torus": (torus, {"rows": None, "cols": None}),
    "grid": (grid, {"rows": None, "cols": None}),
    "star": (star, {}),
    "random_matching": (random_matching, {"seed": 0}),
    "base_k": (base_k, {"k": 1}),
    "file": (edge_list, {"path": REQUIRED, "directed": False, "weights": "metropolis"}),
}
NAMES = tuple(FAMILIES)


def knows_hosts(name: str) -> bool:
    """Return whether the rounds of the topology `name` depend on which workers share a host; False if unknown."""
    return name == "aer"


def build(name: str, world_size: int, workers_per_host: int = 1, **options: Any) -> Topology:
    """Return the topology `name` over `world_size` workers; with one worker, every name gives one idle round.

    Options in addition to the family's own (see FAMILIES):
        idle_rounds: rounds without communication (local steps) after each round; default 0.
        between_hosts: every host averages over its workers, then the hosts mix like that many workers of the topology;
            for each message that such a worker would send, one leaves the host. Default False.

    Raises ValueError for an unknown name or option, a value out of range, or a world size for which the family
    does not exist; the message says for which sizes it exists and what to use instead.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        hint = did_you_mean(name, NAMES)
        raise ValueError(f"topology: expected one of {', '.join(NAMES)}; got {name!r}{hint}")
    where = f"topology {name!r}"
    n = integer(f"{where}: world_size", world_size, minimum=1, maximum=MOST_WORKERS)
    size = integer(f"{where}: workers_per_host", workers_per_host, minimum=1)
    idle_rounds = options.pop("idle_rounds", 0)
    idle_rounds = integer(f"{where}: idle_rounds", idle_rounds, minimum=0, maximum=MOST_IDLE)
    of_hosts = flag(f"{where}: between_hosts", options.pop("between_hosts", False))
    family, defaults = FAMILIES[name]
    chosen = _chosen(where, defaults, options)
    if of_hosts and n > 1:
        _check_hosts(name, n, size)
    agents = n // size if of_hosts else n
    if agents <= 1:
        schedule: Schedule = (Round.idle(1),)
    else:
        schedule = family(agents, **chosen, **({"workers_per_host": size} if knows_hosts(name) else {}))
    if n > 1:
        schedule = spread(schedule, size if of_hosts else 1, idle_rounds)
    shown = {key: value for key, value in chosen.items() if value is not None}
    shown |= {"idle_rounds": idle_rounds} if idle_rounds else {}
    shown |= {"between_hosts": True} if of_hosts else {}
    return Topology(name, n, size, shown, schedule=schedule)


def _chosen(where: str, defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with defaults filled in; raise ValueError for unknown or missing ones."""
    allowed = (*defaults, "idle_rounds", "between_hosts")
    for key in options:
        if key not in allowed:
            hint = did_you_mean(key, (*allowed, "workers_per_host"))
            raise ValueError(f"{where}: options: expected names among {', '.join(allowed)}; got {key!r}{hint}")
    chosen = defaults | options
    for key, value in chosen.items():
        if value is REQUIRED:
            raise ValueError(f"{where}: {key}: expected a value for this option, got none")
    return chosen


def _check_hosts(name: str, n: int, workers_per_host: int) -> None:
    """Raise ValueError if between_hosts=True makes no sense."""
    if knows_hosts(name):
        raise ValueError(f"topology {name!r}: between_hosts: expected False, this topology knows hosts by itself")
    if n % workers_per_host:
        raise ValueError(
            f"topology {name!r}: between_hosts: expected hosts of one size, got world_size={n}, "
            f"workers_per_host={workers_per_host}"
        )


def _uniform(neighbourhoods: list[set[int]]) -> Round:
    """Return the round in which worker i takes equal weights from the workers `neighbourhoods[i]`, itself included."""
    return Round(tuple(dict.fromkeys(workers, 1 / len(workers)) for workers in neighbourhoods))


@lru_cache(maxsize=16)  # rounds of a step: its buckets and fragments ask for the same few; each takes memory
def _matching(n: int, seed: int, t: int) -> Round:
    # RandomState, not Generator: its stream is frozen (NEP 19), so all workers agree whatever their numpy version.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, t]))).permutation(n).tolist()
    return Round.from_groups(zip(order[: n // 2], order[n // 2 :], strict=False), n)


def _rows_and_columns(name: str, n: int, rows: int | None, cols: int | None) -> tuple[int, int]:
    """Return (rows, cols) with rows * cols == n; without either, the most square ones, with rows <= cols.

    Raises ValueError, naming the topology `name`, when rows * cols is not n.
    """
    for key, value in (("rows", rows), ("cols", cols)):
        if value is not None and n % integer(f"topology {name!r}: {key}", value, minimum=1):
            raise ValueError(f"topology {name!r}: {key}: expected a divisor of world_size={n}, got {value}")
    if rows is None:
        rows = n // cols if cols else max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    if cols is None:
        cols = n // rows
    if rows * cols != n:
        raise ValueError(
            f"topology {name!r}: rows * cols: expected world_size={n}, got {rows} * {cols} = {rows * cols}"
        )
    return rows, cols
