"""Rows and columns of the two-dimensional topologies."""

import math

from common.arguments import integer


def rows_and_columns(name: str, n: int, rows: int | None, cols: int | None) -> tuple[int, int]:
    """Return (rows, cols) with rows * cols == n; without either, the most square ones, with rows <= cols.

    Raises ValueError, naming the topology `name`, when rows * cols is not n.
    """
    for key, value in (("rows", rows), ("cols", cols)):
        if value is not None and n % integer(f"topology {name!r}: {key}", value, minimum=1):
            raise ValueError(f"topology {name!r}: {key}: expected a divisor of world_size={n}, got {value}")
    if rows is None and cols is None:
        rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    if rows is None:
        rows = n // cols
    if cols is None:
        cols = n // rows
    if rows * cols != n:
        raise ValueError(
            f"topology {name!r}: rows * cols: expected world_size={n}, got {rows} * {cols} = {rows * cols}"
        )
    return rows, cols
