"""Static ring."""

from common.topology.round import Round


def schedule(n: int) -> tuple[Round, ...]:
    """Return the static bidirectional ring: 1/3 for oneself and each neighbour (1/2 for the two of n = 2).

    |lambda_2| = 1/3 + 2/3 cos(2 pi / n) for n >= 4 (arXiv 2110.13363); for n <= 3 it is the complete graph.
    """
    neighbourhoods = [{(i - 1) % n, i, (i + 1) % n} for i in range(n)]
    return (Round(tuple(dict.fromkeys(workers, 1 / len(workers)) for workers in neighbourhoods)),)
