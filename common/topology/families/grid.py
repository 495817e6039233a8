"""Two-dimensional grid (mesh) without wrap-around."""

from common.topology.families.shape import rows_and_columns
from common.topology.round import Round


def schedule(n: int, *, rows: int | None = None, cols: int | None = None) -> tuple[Round, ...]:
    """Return the static grid; worker r * cols + c sits at row r, column c.

    An edge between i and j weighs 1 / (1 + max(degree of i, degree of j)), the Metropolis-Hastings rule, and each
    worker keeps the rest: symmetric and doubly stochastic. Graph, weights and the most square shape (rows <= cols)
    that is taken without `rows` and `cols` are those of BlueFog's MeshGrid2DGraph, the only grid of the library with
    which arXiv 2110.13363 measured its "grid". A prime n gives a path.

    Raises ValueError when rows * cols is not n.
    """
    rows, cols = rows_and_columns("grid", n, rows, cols)
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
