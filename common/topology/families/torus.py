"""Two-dimensional torus (grid with wrap-around)."""

from common.topology.families.shape import rows_and_columns
from common.topology.round import Round


def schedule(n: int, *, rows: int | None = None, cols: int | None = None) -> tuple[Round, ...]:
    """Return the static torus; worker r * cols + c sits at row r, column c.

    Weights are uniform over the worker itself and its distinct neighbours above, below, left and right: 1/5
    usually, fewer where a dimension of 1 or 2 makes some of them fall together. Without `rows` and `cols` the
    most square factorisation is taken; a prime n thus gives 1 x n, the ring.

    Raises ValueError when rows * cols is not n.
    """
    rows, cols = rows_and_columns("torus", n, rows, cols)
    neighbourhoods = []
    for i in range(n):
        r, c = divmod(i, cols)
        around = [(r, c), (r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
        neighbourhoods.append({(row % rows) * cols + col % cols for row, col in around})
    return (Round(tuple(dict.fromkeys(workers, 1 / len(workers)) for workers in neighbourhoods)),)
