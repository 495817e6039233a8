"""A topology as a value: a schedule of rounds that can be printed, compared and tested without processes.

Products P of its mixing matrices [n, n] tell how well it mixes, by their second eigenvalue and contraction.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from common.arguments import check_arguments, integer
from common.topology.round import MOST_WORKERS, Round

RANDOM_SAMPLE = 64  # rounds that represent a random schedule where a periodic one would use its period
NOISE = 1e-10  # an eigenvalue of a whole period below this is rounding error of an exact average


@runtime_checkable
class RandomSchedule(Protocol):
    """A schedule without a period; round t depends on a seed and t only, so that all workers draw the same."""

    world_size: int

    def __call__(self, t: int) -> Round:
        """Return round t."""
        ...

    def contraction(self) -> float:
        """Return sqrt(lambda_2(E[W^T W])), the root mean square contraction of one round."""
        ...


Schedule = tuple[Round, ...] | RandomSchedule


@dataclass(frozen=True)
class Topology:
    """A schedule of rounds over `world_size` workers; worker i lives on host i // workers_per_host.

    `schedule` is either one period of rounds or a RandomSchedule. `build` makes the named ones; for your own:

        Topology("mine", world_size=4, schedule=(Round.from_groups([(0, 3), (1, 2)], 4), ...))

    Raises ValueError if the schedule is empty or has another world size, or a field has the wrong type.
    """

    name: str
    world_size: int
    workers_per_host: int = 1
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    schedule: Schedule = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        integer("world_size", self.world_size, minimum=1, maximum=MOST_WORKERS)
        integer("workers_per_host", self.workers_per_host, minimum=1)
        check_arguments(Topology, vars(self), prefix="topology: ")
        object.__setattr__(self, "options", dict(self.options))
        members = self.schedule if isinstance(self.schedule, tuple) else (self.schedule,)
        if not members:
            raise ValueError(f"topology {self.name!r}: schedule: expected at least one round, got none")
        for t, member in enumerate(members):
            if member.world_size != self.world_size:
                raise ValueError(
                    f"topology {self.name!r}: schedule, round {t}: expected {self.world_size} workers, "
                    f"got {member.world_size}"
                )

    def __str__(self) -> str:
        """Return the name, the options and the hosts; as in the fingerprint, without the path of a file."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items() if key != "path")
        hosts = f" on hosts of {self.workers_per_host}" if self.workers_per_host > 1 else ""
        return f"{self.name}{f'({options})' if options else ''}{hosts}"

    @property
    def period(self) -> int | None:
        """Rounds until the schedule repeats; None for random schedules."""
        return len(self.schedule) if isinstance(self.schedule, tuple) else None

    def round(self, t: int) -> Round:
        """Return the round of step t >= 0."""
        t = integer("t (the round's number)", t, minimum=0)
        if isinstance(self.schedule, tuple):
            return self.schedule[t % len(self.schedule)]
        return self.schedule(t)

    def matrix(self, t: int) -> np.ndarray:
        """Return the mixing matrix of step t, float64 [n, n]; row i: the weights with which i mixes."""
        return self.round(t).matrix()

    @cached_property
    def sample(self) -> tuple[Round, ...]:
        """One period of rounds, or the first 64 of a random schedule."""
        if isinstance(self.schedule, tuple):
            return self.schedule
        return tuple(self.schedule(t) for t in range(RANDOM_SAMPLE))

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether every round keeps the mean (rows and columns sum to 1); if not, it needs push-sum."""
        return all(round_.doubly_stochastic for round_ in self.sample)

    @cached_property
    def symmetric(self) -> bool:
        """Whether in every round each worker gives to the workers it takes from, with the same weight."""
        return all(round_.symmetric for round_ in self.sample)

    def spectral_gap(self) -> float:
        """Return the spectral gap of one round, in [0, 1]; 1.0 means that the schedule averages exactly, to 1e-10.

        Schedules of p rounds: 1 - |lambda_2(W(p-1) ... W(0))|^(1/p), where lambda_2 is the largest eigenvalue by
        modulus other than the eigenvalue 1 of the consensus (or of the Perron vector, for push-sum matrices).

        Random schedules: 1 - sqrt(lambda_2(E[W^T W])). This is the root mean square contraction of the consensus
        distance (Boyd et al. 2006, "Randomized gossip algorithms"), known in closed form. It is not a Lyapunov
        exponent, so take care when comparing it with periodic schedules.
        """
        if self.world_size == 1:
            return 1.0
        if not isinstance(self.schedule, tuple):
            return float(1 - self.schedule.contraction())
        second = second_eigenvalue(product(self.schedule))
        return float(1 - second ** (1 / len(self.schedule))) if second > NOISE else 1.0

    def rounds_to_consensus(self, tolerance: float = 1e-10, limit: int = 10_000) -> int | None:
        """Return the least t for which rounds 0..t-1 contract to `tolerance` or less; None if t exceeds `limit`.

        A topology that averages exactly gets there in a jump, others by decay: `spectral_gap() == 1` tells which.
        """
        matrices = [round_.matrix() for round_ in self.sample] if self.period else None
        n, P = self.world_size, np.eye(self.world_size)
        for t in range(limit + 1):
            D = debiased(P) - 1 / n
            # The Frobenius norm, at most sqrt(n) times the spectral one, is a much cheaper way to rule P out.
            if np.linalg.norm(D) <= n**0.5 * tolerance and np.linalg.norm(D, ord=2) <= tolerance:
                return t
            P = (matrices[t % len(matrices)] if matrices else self.matrix(t)) @ P
        return None

    def fingerprint(self) -> str:
        """Return the SHA-256 hex digest of name, sizes, options and rounds (one period, or the first 64).

        Equal on all workers, processes and platforms for equal schedules: weights are rounded to 12 digits, and
        an edge-list file counts by its contents, not by its path, which may differ between hosts.
        """
        options = {key: value for key, value in self.options.items() if key != "path"}
        head = [self.name, self.world_size, self.workers_per_host, self.period, options]
        digest = hashlib.sha256(json.dumps(head, sort_keys=True, default=str).encode())
        for round_ in self.sample:
            rows = (" ".join(f"{j}:{weight:.12g}" for j, weight in row.items()) for row in round_.weights)
            digest.update(("\n" + ";".join(rows)).encode())
        return digest.hexdigest()


def product(rounds: Iterable[Round]) -> np.ndarray:
    """Return W(p-1) ... W(1) W(0), float64 [n, n]: the joint effect of the rounds, applied in order."""
    first, *others = rounds
    P = first.matrix()
    for round_ in others:
        P = round_.matrix() @ P
    return P


def second_eigenvalue(P: np.ndarray) -> float:
    """Return |lambda_2| in [0, 1] of a matrix [n, n] whose columns sum to 1.

    The eigenvalue 1 is removed by subtracting its projector v 1^T, with v the Perron vector (v = 1/n when P
    is doubly stochastic): sorting eigenvalues would confuse it with others of modulus 1.
    """
    power = deflated = P - np.outer(perron_vector(P), np.ones(len(P)))
    second = float(min(1.0, np.abs(np.linalg.eigvals(deflated)).max()))
    # If a power is zero, as of de Bruijn graphs, eigenvalues are roots of rounding errors, and powers end in a jump.
    while second < 0.1 and (size := np.abs(power).max()) > NOISE:
        power = power @ deflated
        if np.abs(power).max() < NOISE * size:
            return 0.0
    return second


def perron_vector(P: np.ndarray) -> np.ndarray:
    """Return v [n] with P v = v and sum 1; the one of least norm when several exist."""
    n = len(P)
    if np.allclose(P.sum(axis=1), 1, rtol=0, atol=1e-9):
        return np.full(n, 1 / n)
    equations = np.vstack([P - np.eye(n), np.ones(n)])
    return np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]


def contraction(P: np.ndarray) -> float:
    """Return ||P - J/n||_2 with J all ones: the worst factor by which P shrinks the consensus distance.

    P is any product of rounds, [n, n]; a push-sum product is de-biased first.
    """
    return float(np.linalg.norm(debiased(P) - 1 / len(P), ord=2))


def debiased(P: np.ndarray) -> np.ndarray:
    """Return P [n, n] with each row divided by its sum, as push-sum divides by its weights.

    Leaves a doubly stochastic P as it is; a row of zeros, of a worker that took nothing, stays zero.
    """
    sums = P.sum(axis=1, keepdims=True)
    return np.divide(P, sums, out=np.zeros_like(P), where=sums > 0)
