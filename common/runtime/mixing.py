"""The spectral gap of topologies over thousands of workers."""

import math

import numpy as np
from scipy.sparse import csr_array

from common.topology import Round, Topology

DENSE = 512  # workers up to which eigenvalues of the whole matrix take under a second
EXACT = 1e-9


def gap_per_round(topology: Topology) -> float:
    """Return `topology.spectral_gap()`; for more than 512 workers only where it is cheap, else nan.

    Cheap are schedules that average exactly (seen on a random vector, which a matrix other than J/n changes with
    probability 1), and those whose rounds are all circulant: their eigenvalues are the products of the rounds' discrete
    Fourier transforms.
    """
    n = topology.world_size
    if n <= DENSE:
        return topology.spectral_gap()
    if topology.period is None:
        return math.nan
    first_rows = [_first_row(round_) for round_ in topology.sample]
    if all(row is not None for row in first_rows):
        eigenvalues = np.prod(np.fft.fft(np.array(first_rows), axis=1), axis=0)
        second = np.abs(eigenvalues[1:]).max()
        return float(1 - second ** (1 / topology.period)) if second > EXACT else 1.0
    x = np.random.default_rng(0).standard_normal(n)
    mean = x.mean()
    for round_ in topology.sample:
        x = _matrix(round_) @ x
    return 1.0 if np.abs(x - mean).max() < EXACT else math.nan


def _first_row(round_: Round) -> np.ndarray | None:
    """Row 0 [n] of a circulant matrix (W_ij depends on j - i mod n only), else None."""
    n, first = round_.world_size, dict(round_.weights[0])
    for i, row in enumerate(round_.weights):
        if {(j - i) % n: weight for j, weight in row.items()} != first:
            return None
    values = np.zeros(n)
    values[list(first)] = list(first.values())
    return values


def _matrix(round_: Round) -> csr_array:
    entries = [(weight, i, j) for i, row in enumerate(round_.weights) for j, weight in row.items()]
    weights, rows, columns = zip(*entries, strict=True)
    return csr_array((weights, (rows, columns)), shape=(round_.world_size,) * 2)
