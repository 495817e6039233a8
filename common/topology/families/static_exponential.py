"""Static exponential graph."""

from common.topology.round import Round


def schedule(n: int) -> tuple[Round, ...]:
    """Return the static exponential graph of Ying et al. (NeurIPS 2021, arXiv 2110.13363).

    Directed: worker i takes from (i + 2^k) mod n for k = 0..ceil(log2 n)-1, weight 1/(ceil(log2 n)+1) each and
    for itself. The spectral gap is 2/(1+ceil(log2 n)) for even n and larger for odd n > 2.
    """
    hops = (n - 1).bit_length()  # ceil(log2 n)
    # 0 < 2^k < n for all k: the peers are distinct and none is i itself, so no two weights fall together.
    offsets = [0] + [2**k for k in range(hops)]
    return (Round(tuple({(i + offset) % n: 1 / (hops + 1) for offset in offsets} for i in range(n))),)
