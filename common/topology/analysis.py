"""How well a topology mixes: spectral gap, contraction, rounds to consensus, connectivity."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from common.topology.round import Round

NOISE = 1e-10  # an eigenvalue of a whole period below this is rounding error of an exact average


class Scheduled(Protocol):
    """What is analysed: a `common.topology.Topology`."""

    world_size: int
    schedule: Any
    period: int | None
    sample: tuple[Round, ...]

    def matrix(self, t: int) -> np.ndarray:
        """Return the mixing matrix of step t."""


def product(rounds: Iterable[Round]) -> np.ndarray:
    """Return W(p-1) ... W(1) W(0), float64 [n, n]: what the rounds, applied in order, do together."""
    first, *others = rounds
    P = first.matrix()
    for round_ in others:
        P = round_.matrix() @ P
    return P


def spectral_gap(topology: Scheduled) -> float:
    """Return the spectral gap of one round, in [0, 1]; 1.0 means that the schedule averages exactly.

    Schedules of p rounds: 1 - |lambda_2(W(p-1) ... W(0))|^(1/p), where lambda_2 is the largest eigenvalue by
    modulus besides the one 1 of the consensus (or of the Perron vector, for push-sum matrices).

    Random schedules: 1 - sqrt(lambda_2(E[W^T W])). This is the contraction of the consensus distance in root
    mean square (Boyd et al. 2006, "Randomized gossip algorithms"), known in closed form; it is no
    Lyapunov exponent, so compare it with periodic schedules with care.
    """
    if topology.world_size == 1:
        return 1.0
    if topology.period is None:
        return float(1 - topology.schedule.contraction())
    second = second_eigenvalue(product(topology.sample))
    return float(1 - second ** (1 / topology.period)) if second > NOISE else 1.0


def second_eigenvalue(P: np.ndarray) -> float:
    """Return |lambda_2| in [0, 1] of a matrix [n, n] whose columns sum to 1.

    The eigenvalue 1 is removed by subtracting its projector v 1^T, with v the Perron vector (v = 1/n when P
    is doubly stochastic): sorting eigenvalues would confuse it with others of modulus 1.
    """
    deflated = P - np.outer(perron_vector(P), np.ones(len(P)))
    return float(min(1.0, np.abs(np.linalg.eigvals(deflated)).max()))


def perron_vector(P: np.ndarray) -> np.ndarray:
    """Return v [n] with P v = v and sum 1; the one of least norm when several exist."""
    n = len(P)
    if np.allclose(P.sum(axis=1), 1, rtol=0, atol=1e-9):
        return np.full(n, 1 / n)
    equations = np.vstack([P - np.eye(n), np.ones(n)])
    return np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]


def contraction(P: np.ndarray) -> float:
    """Return ||P - J/n||_2 with J all ones: the worst factor by which P shrinks the consensus distance.

    P is any product of rounds, [n, n]; a push-sum one is de-biased first.
    """
    return float(np.linalg.norm(debiased(P) - 1 / len(P), ord=2))


def debiased(P: np.ndarray) -> np.ndarray:
    """Return P [n, n] with each row divided by its sum, as push-sum divides by its weights.

    Leaves a doubly stochastic P as it is; a row of zeros, of a worker that took nothing, stays zero.
    """
    sums = P.sum(axis=1, keepdims=True)
    return np.divide(P, sums, out=np.zeros_like(P), where=sums > 0)


def period_contraction(topology: Scheduled) -> float:
    """Return the contraction of one whole period; of the first 64 rounds for random schedules."""
    return contraction(product(topology.sample))


def rounds_to_consensus(topology: Scheduled, tolerance: float = 1e-10, limit: int = 10_000) -> int | None:
    """Return the least t for which rounds 0..t-1 contract to `tolerance` or less; None if t exceeds `limit`.

    A topology that averages exactly gets there by a jump, others by decay: `spectral_gap() == 1` tells which.
    """
    n = topology.world_size
    matrices = [round_.matrix() for round_ in topology.sample] if topology.period else None
    P = np.eye(n)
    for t in range(limit + 1):
        D = debiased(P) - 1 / n
        # The Frobenius norm, at most sqrt(n) times the spectral one, is much the cheaper to rule a round out.
        if np.linalg.norm(D) <= n**0.5 * tolerance and np.linalg.norm(D, ord=2) <= tolerance:
            return t
        P = (matrices[t % len(matrices)] if matrices else topology.matrix(t)) @ P
    return None


def is_connected(topology: Scheduled) -> bool:
    """Return whether every worker reaches every other along the edges of one period (64 rounds when random)."""
    reach = sum(round_.matrix() for round_ in topology.sample) > 0
    return strongly_connected(reach)


def strongly_connected(edges: np.ndarray) -> bool:
    """Return whether every node reaches every other along `edges`, bool [n, n]."""
    return _reaches_all(edges) and _reaches_all(edges.T)


def _reaches_all(edges: np.ndarray) -> bool:
    return reached_from(0, edges).all()


def reached_from(start: int, edges: np.ndarray) -> np.ndarray:
    """Return a mask, bool [n], of the nodes j reached from `start` along edges[i, j], itself included."""
    seen = np.zeros(len(edges), dtype=bool)
    seen[start] = True
    frontier = seen
    while frontier.any():
        frontier = edges[frontier].any(axis=0) & ~seen
        seen = seen | frontier
    return seen
