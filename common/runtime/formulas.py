"""The runtime models of the papers as closed forms; `steps` simulates what they leave out.

Published (arXiv 2110.13363): the time of one round for a message of M bytes, bandwidth B and latency L. The runtime
model of arXiv 2410.11998 itself is not at hand: what a step takes is derived here from what that paper says its
speed-up comes from (overlap with computing, cheaper rounds between hosts, less waiting for slow workers), and so
marked. Units: MB (1e6 bytes), Gbit/s, microseconds; results in ms.
"""

import math

import numpy as np
from scipy.stats import lognorm

from common.runtime.network import mb_ms


def parameter_server_ms(n: int, megabytes: float, gbps: float, latency_us: float) -> float:
    """n M/B + L: everybody sends to one. Published."""
    return n * mb_ms(megabytes, gbps) + latency_us / 1000


def ring_allreduce_ms(n: int, megabytes: float, gbps: float, latency_us: float) -> float:
    """2 M/B + 2 n L. Published, for large n; `network.allreduce_ms` has the exact 2 (n-1)/n M/B + 2 (n-1) L."""
    return 2 * mb_ms(megabytes, gbps) + 2 * n * latency_us / 1000


def static_exponential_ms(n: int, megabytes: float, gbps: float, latency_us: float) -> float:
    """log2(n) (M/B + L): a message to each of log2 n peers, one after another. Published."""
    return math.log2(n) * one_peer_ms(megabytes, gbps, latency_us)


def one_peer_ms(megabytes: float, gbps: float, latency_us: float) -> float:
    """M/B + L: one message. Published."""
    return mb_ms(megabytes, gbps) + latency_us / 1000


def allreduce_step_ms(
    compute_ms: float, bucket_ms: float, buckets: int, backward_share: float = 2 / 3, update_ms: float = 0.0
) -> float:
    """A step whose gradients are reduced in B buckets of `bucket_ms` each during the backward pass. Derived.

    Bucket b may go when (b + 1)/B of the backward pass c_b is over, and one after another:

        c_f + max(c_b/B + B e,  c_b + e) + u        with e = bucket_ms

    compute_ms is that of the slowest worker (`slowest_ms`).
    """
    backward = backward_share * compute_ms
    travel = max(backward / buckets + buckets * bucket_ms, backward + bucket_ms)
    return compute_ms - backward + travel + update_ms


def gossip_step_ms(
    compute_ms: float, exchange_ms: float, update_ms: float = 0.0, *, overlap: bool = True, bucketwise: bool = False
) -> float:
    """A step of gossip in which every round takes `exchange_ms`, among equally fast workers. Derived.

    max(c, e) + u     overlapped with the whole step (awc), all merged before an ordinary optimizer's update
    max(c + u, e)     overlapped, and updated bucket by bucket while others travel; for many buckets
    c + e + u         not overlapped (atc)
    """
    if not overlap:
        return compute_ms + exchange_ms + update_ms
    if bucketwise:
        return max(compute_ms + update_ms, exchange_ms)
    return max(compute_ms, exchange_ms) + update_ms


def aer_step_ms(
    compute_ms: float, across_ms: float, inside_ms: float = 0.0, update_ms: float = 0.0, *, staggered: bool = False
) -> float:
    """A step of the alternating exponential ring, whose hosts exchange across in every second round. Derived.

    (max(c, e) + max(c, i)) / 2 + u     the mean of both kinds of rounds, e across and i inside
    max(c, e/2, i/2) + u                staggered: half of the buckets go across in every round
    """
    if staggered:
        return max(compute_ms, across_ms / 2, inside_ms / 2) + update_ms
    return (max(compute_ms, across_ms) + max(compute_ms, inside_ms)) / 2 + update_ms


def slowest_ms(compute_ms: float, jitter: float, n: int) -> float:
    """Mean compute time of the slowest of n workers: what a step of all-reduce waits for. Derived.

    Compute times are lognormal with mean compute_ms and log standard deviation `jitter`:
    E[max] is the integral of 1 - F(x)^n over x >= 0.
    """
    if jitter == 0 or n == 1:
        return compute_ms
    one = lognorm(s=jitter, scale=compute_ms * math.exp(-(jitter**2) / 2))
    x = np.linspace(0, one.ppf(1 - 1e-9 / n), 20_001)
    return float(np.trapezoid(1 - one.cdf(x) ** n, x))
