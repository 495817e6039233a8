"""One gossip step as a value: a sparse mixing matrix and the structure that follows from it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from common.arguments import integer

MOST_WORKERS = 1 << 14  # rounds list all of them, some all pairs
TOLERANCE = 1e-9  # how far a sum of weights may be from 1: room for weights typed with few digits


@dataclass(frozen=True)
class Round:
    """One gossip step x_i <- sum_j W_ij x_j of n workers.

    `weights[i]` is row i of W as {j: W_ij}, nonzero entries only, the worker itself included. Every column must
    sum to 1, so that the sum over the workers is kept; W is doubly stochastic if the rows sum to 1 too, and
    otherwise a push-sum matrix. Weights are never negative.

    Raises ValueError if a weight or a sum breaks these rules.
    """

    weights: tuple[Mapping[int, float], ...]

    def __post_init__(self) -> None:
        rows = self._checked_rows()
        if not rows:
            raise ValueError("Round.weights: expected at least one row, got none")
        object.__setattr__(self, "weights", rows)
        given = [0.0] * len(rows)
        for row in rows:
            for j, weight in row.items():
                given[j] += weight
        for j, total in enumerate(given):
            if abs(total - 1) > TOLERANCE:
                raise ValueError(
                    f"Round.weights: column {j} (what the workers take from worker {j}): "
                    f"expected a sum of 1, got {total:.12g}"
                )

    def _checked_rows(self) -> tuple[Mapping[int, float], ...]:
        """Return the checked rows; workers of a group that share one row object still do."""
        checked: dict[int, Mapping[int, float]] = {}
        for i, row in enumerate(self.weights):
            if id(row) not in checked:
                checked[id(row)] = self._checked_row(i, row)
        return tuple(checked[id(row)] for row in self.weights)

    def _checked_row(self, i: int, row: Mapping[int, float]) -> Mapping[int, float]:
        n = len(self.weights)
        for j, weight in row.items():
            if not 0 <= j < n:
                raise ValueError(f"Round.weights: row {i}: expected workers 0..{n - 1}, got {j}")
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"Round.weights: row {i}, worker {j}: expected a weight >= 0, got {weight}")
        return MappingProxyType({int(j): float(row[j]) for j in sorted(row) if row[j] != 0})

    def __hash__(self) -> int:
        return hash(tuple(tuple(row.items()) for row in self.weights))

    def __reduce__(self) -> tuple:  # a mappingproxy can be neither pickled nor deep-copied
        return type(self), (tuple(dict(row) for row in self.weights),)

    @classmethod
    def idle(cls, world_size: int) -> "Round":
        """Return the round without communication (W = I)."""
        n = integer("Round.idle: world_size", world_size, minimum=1, maximum=MOST_WORKERS)
        return cls(tuple({i: 1.0} for i in range(n)))

    @classmethod
    def from_groups(cls, groups: Iterable[Sequence[int]], world_size: int) -> "Round":
        """Return the round in which each of the disjoint groups averages uniformly and the others idle.

        Raises ValueError when two groups share a worker.
        """
        n = integer("Round.from_groups: world_size", world_size, minimum=1, maximum=MOST_WORKERS)
        rows: list[Mapping[int, float] | None] = [None] * n
        for group in groups:
            row = dict.fromkeys(group, 1 / len(group))
            for i in group:
                if rows[i] is not None:
                    raise ValueError(f"Round.from_groups: expected disjoint groups, got worker {i} twice")
                rows[i] = row
        return cls(tuple({i: 1.0} if row is None else row for i, row in enumerate(rows)))

    @classmethod
    def from_matrix(cls, W: np.ndarray) -> "Round":
        """Return the round with mixing matrix W [n, n]."""
        if W.ndim != 2 or W.shape[0] != W.shape[1]:
            raise ValueError(f"Round.from_matrix: expected a square matrix, got shape {W.shape}")
        return cls(tuple({int(j): float(row[j]) for j in np.flatnonzero(row)} for row in W))

    @property
    def world_size(self) -> int:
        """The number of workers n."""
        return len(self.weights)

    def matrix(self) -> np.ndarray:
        """Return W as a new float64 array [n, n]."""
        W = np.zeros((self.world_size, self.world_size))
        for i, row in enumerate(self.weights):
            W[i, list(row)] = list(row.values())
        return W

    def in_peers(self, worker: int) -> dict[int, float]:
        """Return {j: W_ij} for the workers j other than i = `worker` that i takes from, in order of j."""
        return {j: weight for j, weight in self.weights[worker].items() if j != worker}

    def out_peers(self, worker: int) -> tuple[int, ...]:
        """Return the workers other than `worker` that take from it, in order."""
        return self._out_peers[worker]

    @cached_property
    def _out_peers(self) -> tuple[tuple[int, ...], ...]:
        peers: list[list[int]] = [[] for _ in self.weights]
        for i, row in enumerate(self.weights):
            for j in row:
                if j != i:
                    peers[j].append(i)
        return tuple(map(tuple, peers))

    def self_weight(self, worker: int) -> float:
        """Return W_ii for i = `worker`."""
        return self.weights[worker].get(worker, 0.0)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The disjoint groups that average uniformly, singletons included; None if W has no such groups."""
        found: list[tuple[int, ...]] = []
        for i, row in enumerate(self.weights):
            members = tuple(row)
            if i not in row or any(abs(weight * len(row) - 1) > TOLERANCE for weight in row.values()):
                return None
            if i == members[0]:
                found.append(members)
            elif tuple(self.weights[members[0]]) != members:
                return None
        # Every worker is in one of these groups, so they are disjoint if their sizes add up to n.
        return tuple(found) if sum(map(len, found)) == self.world_size else None

    def between_hosts(self, workers_per_host: int) -> "Round | None":
        """Return the round M of hosts if W = M (x) J/L: every host first averages over its L workers.

        None if W does not have this form. Worker i lives on host i // L.
        """
        if workers_per_host not in self._between:
            self._between[workers_per_host] = self._find_between(workers_per_host)
        return self._between[workers_per_host]

    def on_hosts(self, workers_per_host: int) -> "Round":
        """Return W (x) J/L: hosts of L workers do what these workers do, after averaging inside."""
        size = workers_per_host
        if size == 1:
            return self
        rows = [{j * size + k: w / size for j, w in row.items() for k in range(size)} for row in self.weights]
        return type(self)(tuple(row for row in rows for _ in range(size)))

    @cached_property
    def _between(self) -> "dict[int, Round | None]":
        return {}

    def _find_between(self, size: int) -> "Round | None":
        if self.world_size % size:
            return None
        rows = []
        for first in range(0, self.world_size, size):
            row = self.weights[first]
            if any(dict(self.weights[i]) != dict(row) for i in range(first + 1, first + size)):
                return None
            if any(row.get(j // size * size + k) != weight for j, weight in row.items() for k in range(size)):
                return None
            rows.append({j // size: size * weight for j, weight in row.items()})
        return type(self)(tuple(rows))

    @cached_property
    def is_idle(self) -> bool:
        """Whether no worker communicates (W = I)."""
        return all(tuple(row) == (i,) for i, row in enumerate(self.weights))

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether the rows sum to 1 as well as the columns."""
        return all(abs(sum(row.values()) - 1) <= TOLERANCE for row in self.weights)

    @cached_property
    def symmetric(self) -> bool:
        """Whether W_ij = W_ji for all pairs."""
        return all(
            abs(self.weights[j].get(i, 0.0) - weight) <= TOLERANCE
            for i, row in enumerate(self.weights)
            for j, weight in row.items()
        )
