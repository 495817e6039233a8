"""One-peer exponential graph."""

from common.topology.round import Round


def schedule(n: int) -> tuple[Round, ...]:
    """Return the one-peer exponential graph of Ying et al. (NeurIPS 2021, arXiv 2110.13363).

    Directed: in round k = t mod ceil(log2 n) worker i takes half of worker (i + 2^k) mod n, and gives to
    (i - 2^k) mod n. Any n; for powers of two log2 n successive rounds average exactly, from any start.
    """
    hops = (n - 1).bit_length()  # ceil(log2 n)
    return tuple(Round(tuple({i: 0.5, (i + 2**k) % n: 0.5} for i in range(n))) for k in range(hops))
