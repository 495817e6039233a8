"""Two-dimensional torus (grid with wrap-around)."""

import math

from common.topology import checks
from common.topology.round import Round


def schedule(n: int, *, rows: int | None = None, cols: int | None = None) -> tuple[Round, ...]:
    """Return the static torus; worker r * cols + c sits at row r, column c.

    Weights are uniform over the worker itself and its distinct neighbours above, below, left and right: 1/5
    usually, fewer where a dimension of 1 or 2 makes some of them fall together. Without `rows` and `cols` the
    most square factorisation is taken; a prime n thus gives 1 x n, the ring.

    Raises ValueError when rows * cols is not n.
    """
    rows, cols = _shape(n, rows, cols)
    neighbourhoods = []
    for i in range(n):
        r, c = divmod(i, cols)
        around = [(r, c), (r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
        neighbourhoods.append({(row % rows) * cols + col % cols for row, col in around})
    return (Round(tuple(dict.fromkeys(workers, 1 / len(workers)) for workers in neighbourhoods)),)


def _shape(n: int, rows: int | None, cols: int | None) -> tuple[int, int]:
    for name, value in (("rows", rows), ("cols", cols)):
        if value is not None and n % checks.integer(f"topology 'torus': {name}", value, minimum=1):
            raise ValueError(f"topology 'torus': {name}: expected a divisor of world_size={n}, got {value}")
    if rows is None and cols is None:
        rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    if rows is None:
        rows = n // cols
    if cols is None:
        cols = n // rows
    if rows * cols != n:
        raise ValueError(f"topology 'torus': rows * cols: expected world_size={n}, got {rows} * {cols} = {rows * cols}")
    return rows, cols
