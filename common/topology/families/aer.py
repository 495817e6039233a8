"""Alternating exponential ring: half of the hosts talk across, the others average inside."""

from common.topology.round import Round


def schedule(n: int, workers_per_host: int) -> tuple[Round, ...]:
    """Return the alternating exponential ring of Wang et al. (ICLR 2025, arXiv 2410.11998) for H hosts.

    Two rounds for each distance 2^k, k = 0..log2(H)-1, at which the hosts fall into H/2 pairs. In one of the
    two rounds a pair averages over all its workers, in the other each of its hosts averages inside, and
    neighbouring pairs take turns. As in the authors' code, pairs are counted on from one distance to the
    next, and those with an even number cross in the second of the two rounds. Weights are uniform in every
    group.

    One cycle of 2 log2 H rounds averages exactly. A single host averages completely in every round.

    Raises ValueError when workers_per_host does not divide n or the number of hosts is no power of two.
    """
    if n % workers_per_host:
        raise ValueError(
            f"topology 'aer': workers_per_host: expected a divisor of world_size={n}, got {workers_per_host}"
        )
    hosts = [tuple(range(first, first + workers_per_host)) for first in range(0, n, workers_per_host)]
    if len(hosts) & (len(hosts) - 1):
        raise ValueError(
            "topology 'aer': number of hosts (world_size / workers_per_host): expected a power of two "
            f"(1, 2, 4, 8, ...), got {n} / {workers_per_host} = {len(hosts)}; for other numbers use base_k "
            "(exact averaging for every world size) or one_peer_exponential"
        )
    if len(hosts) == 1:
        return (Round.from_groups(hosts, n),)
    rounds = []
    count = 0
    for k in range(len(hosts).bit_length() - 1):
        halves: tuple[list, list] = ([], [])
        for h in range(len(hosts)):
            if h & 2**k:
                continue  # the partner of an earlier host
            crossing, inside = (halves[1], halves[0]) if count % 2 == 0 else halves
            crossing.append(hosts[h] + hosts[h ^ 2**k])
            inside += [hosts[h], hosts[h ^ 2**k]]
            count += 1
        rounds += [Round.from_groups(half, n) for half in halves]
    return tuple(rounds)
