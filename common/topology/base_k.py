"""Base-(k+1) graph: exact averaging in finite time for every n, with at most k peers a round."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

from common.arguments import integer
from common.topology.round import Round

# The rows {i: {j: W_ij}} of the workers that mix in a round; all others idle. Rounds on disjoint workers can be merged.
Rows = dict[int, dict[int, float]]


def base_k(n: int, *, k: int) -> tuple[Round, ...]:
    """Return the Base-(k+1) graph of Takezawa et al. (NeurIPS 2023, arXiv 2305.11420, Algorithms 1-3).

    Symmetric; every worker has at most k peers in a round, and one period averages exactly from round 0 on. Its
    length is at most 2 log_{k+1}(n) + 2 rounds. k = 1 gives pairs.
    """
    k = integer("topology 'base_k': k", k, minimum=1)
    rounds = _base(range(n), k)
    return tuple(Round(tuple(rows.get(i, {i: 1.0}) for i in range(n))) for rows in rounds)


def _hyper_hypercube(nodes: Sequence[int], k: int) -> list[Rows]:
    """Average exactly where n is a product of factors up to k+1: one round for each factor (Algorithm 1)."""
    rounds = []
    stride = 1
    for factor in _shortest_factorisation(len(nodes), k + 1):
        firsts = [i for i in range(len(nodes)) if i // stride % factor == 0]
        rounds.append(_uniform([nodes[i + stride * m] for m in range(factor)] for i in firsts))
        stride *= factor
    return rounds


def _simple_base(nodes: Sequence[int], k: int) -> list[Rows]:
    """Average exactly over any number of nodes (Algorithm 2).

    With n = a_1 (k+1)^p_1 + ... + a_L (k+1)^p_L, p_1 > ... > p_L, the nodes fall into parts V_l of a_l blocks
    of (k+1)^p_l. First each part averages inside. Then, in step s, V_s mixes with the nodes of all later
    parts so that the mean over these, and the mean over each block of V_s, become their common mean. After
    that the blocks of V_s need only average inside, while the later parts continue with step s + 1.
    """
    if _shortest_factorisation(len(nodes), k + 1) is not None:
        return _hyper_hypercube(nodes, k)
    parts = _digits(nodes, k + 1)
    inside = [_hyper_hypercube(list(chain(*blocks)), k) for blocks in parts]
    after = [_in_parallel([_hyper_hypercube(block, k) for block in blocks]) for blocks in parts]
    after[-1] = inside[-1]  # the last part has the mean already: let it go on mixing
    warm_up = len(inside[0])  # the longest
    rounds = [_merge(_cycled(own, m) for own in inside) for m in range(warm_up)]
    for s in range(len(after[0]) + 1):
        done = [_cycled(after[part], s - part - 1) for part in range(min(s, len(parts)))]
        if s < len(parts) - 1:
            done.append(_exchange(parts[s], list(chain(*chain(*parts[s + 1 :]))), k))
        rounds.append(_merge(done))
    return rounds


def _base(nodes: Sequence[int], k: int) -> list[Rows]:
    """Return simple graphs on p blocks, then hyper-hypercubes across them, or a simple graph on all nodes if shorter.

    This is Algorithm 3. p is the largest divisor of n that is a product of factors up to k+1.
    """
    n = len(nodes)
    p = max(d for d in range(1, n + 1) if n % d == 0 and _shortest_factorisation(d, k + 1) is not None)
    size = n // p
    blocks = [nodes[b * size : (b + 1) * size] for b in range(p)]
    split = _in_parallel([_simple_base(block, k) for block in blocks])
    split += _in_parallel([_hyper_hypercube(across, k) for across in zip(*blocks, strict=True)])
    simple = _simple_base(nodes, k)
    return simple if len(simple) < len(split) else split


def _exchange(blocks: list[Sequence[int]], others: Sequence[int], k: int) -> Rows:
    """Mix each of the `others` with one node of every block; average the nodes left over in groups of k+1.

    With V the nodes of all blocks, v one of the others, and n the number of nodes in both together:
    x_v <- (1 - |V|/n) x_v + |V|/n mean(x over the partners, one in each block of V).
    """
    size = sum(map(len, blocks))
    weight = size / (size + len(others)) / len(blocks)
    rows: Rows = {}
    for m, v in enumerate(others):
        partners = [block[m] for block in blocks]
        rows[v] = {v: 1 - weight * len(blocks)} | dict.fromkeys(partners, weight)
        rows |= {u: {u: 1 - weight, v: weight} for u in partners}
    # They hold equal values in exact arithmetic, but not while training: better mixed than idle.
    left = list(chain(*(block[len(others) :] for block in blocks)))
    return rows | _uniform(left[m : m + k + 1] for m in range(0, len(left), k + 1))


def _digits(nodes: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """Cut the nodes by the digits of n in `base`, highest first: digit a at place p gives a blocks of base^p."""
    parts = []
    start, n = 0, len(nodes)
    place = base ** max(p for p in range(n.bit_length()) if base**p <= n)
    while place:
        digit = (n - start) // place
        if digit:
            parts.append([nodes[start + b * place : start + (b + 1) * place] for b in range(digit)])
        start += digit * place
        place //= base
    return parts


@cache
def _shortest_factorisation(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors in 2..largest with product n, or None if a prime factor of n is larger."""
    if n == 1:
        return ()
    found = []
    for d in range(2, min(n, largest) + 1):
        rest = _shortest_factorisation(n // d, largest) if n % d == 0 else None
        if rest is not None:
            found.append((d, *rest))
    return min(found, key=len, default=None)


def _uniform(groups: Iterable[Sequence[int]]) -> Rows:
    return {i: dict.fromkeys(group, 1 / len(group)) for group in groups for i in group}


def _merge(disjoint: Iterable[Rows]) -> Rows:
    return {i: row for rows in disjoint for i, row in rows.items()}


def _in_parallel(schedules: list[list[Rows]]) -> list[Rows]:
    return [_merge(rows) for rows in zip(*schedules, strict=True)]


def _cycled(rounds: list[Rows], m: int) -> Rows:
    # Parts that wait for others go on mixing; a part of one node has no rounds and idles.
    return rounds[m % len(rounds)] if rounds else {}
