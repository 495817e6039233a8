"""How well products of mixing matrices [n, n] mix: second eigenvalue, contraction, connectivity."""

from collections.abc import Iterable

import numpy as np

from common.topology.round import Round

NOISE = 1e-10  # an eigenvalue of a whole period below this is rounding error of an exact average


def product(rounds: Iterable[Round]) -> np.ndarray:
    """Return W(p-1) ... W(1) W(0), float64 [n, n]: what the rounds, applied in order, do together."""
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


def contracts_to(tolerance: float, P: np.ndarray) -> bool:
    """Return whether `contraction(P)` is at most `tolerance`."""
    D = debiased(P) - 1 / len(P)
    # The Frobenius norm, at most sqrt(n) times the spectral one, is much the cheaper to rule P out.
    return bool(np.linalg.norm(D) <= len(P) ** 0.5 * tolerance and np.linalg.norm(D, ord=2) <= tolerance)


def debiased(P: np.ndarray) -> np.ndarray:
    """Return P [n, n] with each row divided by its sum, as push-sum divides by its weights.

    Leaves a doubly stochastic P as it is; a row of zeros, of a worker that took nothing, stays zero.
    """
    sums = P.sum(axis=1, keepdims=True)
    return np.divide(P, sums, out=np.zeros_like(P), where=sums > 0)
