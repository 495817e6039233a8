"""Ring on which each worker talks to one neighbour at a time."""

from common.topology.round import Round


def schedule(n: int) -> tuple[Round, ...]:
    """Return the pairings (t, t+1), (t+2, t+3), ... mod n of round t, weight 1/2.

    Even n: two perfect matchings alternate, each worker turning to its right and left neighbour (a single one
    for n = 2, where both are the same). Odd n: no perfect matching exists, so worker t-1 idles in round t; over
    a period of n rounds each worker idles once, each edge is used equally often, and successive rounds share no
    edge.
    """
    period = n if n % 2 else min(n // 2, 2)
    return tuple(
        Round.from_groups([((t + 2 * m) % n, (t + 2 * m + 1) % n) for m in range(n // 2)], n) for t in range(period)
    )
