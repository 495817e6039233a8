"""The runtime model's description of a cluster and of what is trained on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from common.arguments import Bounds, check_arguments

# More pieces would change little: of 32, the first and last make up 6 % of a message. Thousands of workers get fewer,
# so that the simulation takes seconds.
MOST_BUCKETS, MOST_PIECES = 32, 2**14
# Limits on workers and on pieces of the gradients: beyond them a prediction would take hours.
MOST_WORKERS, MOST_GRADIENT_BUCKETS = 2**14, 2**18

# Bounds that no machine reaches, with room to spare.
Count = Annotated[int, Bounds(1, MOST_WORKERS)]
Size = Annotated[float, Bounds(1e-9, 1e9)]  # MB
Rate = Annotated[float, Bounds(1e-6, 1e9)]  # Gbit/s
Duration = Annotated[float, Bounds(0, 1e9)]  # ms or us
Factor = Annotated[float, Bounds(1e-6, 1e6)]


@dataclass(eq=False)
class Variation:
    """Compute times of a worker, as multiples of the usual one; emulation and prediction draw them alike.

    Equal seeds give equal times.

    jitter:       standard deviation of their logarithm (lognormal, the mean is 1)
    stall_share:  share of the steps that stall, independently of each other
    stall_factor: how many times longer a stalled step takes
    factor:       multiplies the times of all steps
    seed:         for example (seed, worker)
    normal:       where the logarithms are drawn from
    """

    jitter: float = 0.0
    stall_share: float = 0.0
    stall_factor: float = 1.0
    factor: float = 1.0
    seed: Sequence[int] = field(kw_only=True)

    def __post_init__(self) -> None:
        # Separate generators, so that one draw of many steps equals as many draws of one step.
        self.normal, self._uniform = map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(2))

    def draw(self, steps: int = 1) -> np.ndarray:
        """Return the multiples of the next steps, [steps]."""
        times = self.factor * np.exp(self.jitter * self.normal.standard_normal(steps) - self.jitter**2 / 2)
        times[self._uniform.random(steps) < self.stall_share] *= self.stall_factor
        return times


@dataclass(frozen=True)
class Cluster:
    """Hosts of L workers each; worker i lives on host i // L.

    workers_per_host: L
    shards:           ranks of a worker, over which its parameters are sharded (FSDP2). compute_ms includes the
                      gathering and reducing inside the worker
    payload_mb:       parameters of a worker in MB (1e6 bytes): the size of a full message and of the gradients
    compute_ms:       mean forward and backward of one step on one worker
    backward_share:   share of the backward pass in compute_ms; gradients become ready evenly during it
    update_ms:        the optimizer's step
    jitter:           standard deviation of the logarithm of a step's compute time (lognormal, mean compute_ms): 0.05 is
                      about 5 %
    stall_share:      share of a worker's steps that stall, independently of each other
    stall_factor:     how many times longer the compute time of a stalled step is
    inter_gbps:       rate at which a host can send and receive at the same time, Gbit/s; its workers share it
    intra_gbps:       rate at which a rank can send to a rank of its host and receive at the same time, Gbit/s
    latency_us:       of each message between hosts
    intra_latency_us: of each message inside a host
    slow_hosts:       {host: factor}: its compute time is multiplied by the factor
    slow_links:       {host: factor}: the rate of its link to other hosts is divided by the factor
    bucket_mb:        all-reduce sends gradients in pieces of this size, as soon as they are ready
    gossip_bucket_mb: gossip sends parameters in pieces of this size

    Raises ValueError for values of the wrong type or out of range.
    """

    hosts: Count
    workers_per_host: Count = 1
    shards: Count = 1
    payload_mb: Size = 100.0
    compute_ms: Annotated[float, Bounds(1e-9, 1e9)] = 100.0
    backward_share: Annotated[float, Bounds(1e-9, 1)] = 2 / 3
    update_ms: Duration = 0.0
    jitter: Annotated[float, Bounds(0, 1, note="0.05 is about 5 %")] = 0.0
    stall_share: Annotated[float, Bounds(0, 1)] = 0.0
    stall_factor: Annotated[float, Bounds(1, 1e6)] = 1.0
    inter_gbps: Rate = 25.0
    intra_gbps: Rate = 200.0
    latency_us: Duration = 20.0
    intra_latency_us: Duration = 5.0
    bucket_mb: Size = 25.0
    gossip_bucket_mb: Size = 2.0
    slow_hosts: dict[int, Factor] = field(default_factory=dict, hash=False)
    slow_links: dict[int, Factor] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_arguments(Cluster, vars(self))
        for name in ("slow_hosts", "slow_links"):
            for host, factor in getattr(self, name).items():
                if not 0 <= host < self.hosts:
                    raise ValueError(f"{name}={{{host}: {factor}}}: expected hosts 0..{self.hosts - 1}")
        if self.workers > MOST_WORKERS:
            raise ValueError(
                f"hosts={self.hosts} with workers_per_host={self.workers_per_host}: expected at most {MOST_WORKERS} "
                "workers in all"
            )
        if self.payload_mb > self.bucket_mb * MOST_GRADIENT_BUCKETS:
            raise ValueError(
                f"payload_mb={self.payload_mb:g} with bucket_mb={self.bucket_mb:g}: expected at most "
                f"{MOST_GRADIENT_BUCKETS} buckets"
            )

    @property
    def workers(self) -> int:
        """Number of workers on all hosts."""
        return self.hosts * self.workers_per_host

    @property
    def inside_gbps(self) -> float:
        """Rate at which all ranks of a worker together can send to another worker of its host."""
        return self.shards * self.intra_gbps

    @property
    def buckets(self) -> int:
        """Number of pieces of the gradients."""
        return math.ceil(self.payload_mb / self.bucket_mb)

    @property
    def gossip_buckets(self) -> int:
        """Number of pieces of the parameters: at most MOST_BUCKETS, and MOST_PIECES over all workers (at least 4)."""
        most = min(MOST_BUCKETS, max(4, MOST_PIECES // self.workers))
        return min(most, math.ceil(self.payload_mb / self.gossip_bucket_mb))

    @property
    def gossip_bucket_size_mb(self) -> float:
        """Size in MB of one of the `gossip_buckets`."""
        return self.payload_mb / self.gossip_buckets

    @property
    def link_gbps(self) -> np.ndarray:
        """Rate of each host's link to the others, [hosts]."""
        return self.inter_gbps / np.array([self.slow_links.get(host, 1.0) for host in range(self.hosts)])

    def draw_compute_ms(self, steps: int, seed: int) -> np.ndarray:
        """Draw the time in ms of each worker's forward and backward pass in each step, [steps, workers]."""
        factors = [self.slow_hosts.get(worker // self.workers_per_host, 1.0) for worker in range(self.workers)]
        drawn = [
            Variation(self.jitter, self.stall_share, self.stall_factor, factor, seed=(seed, worker)).draw(steps)
            for worker, factor in enumerate(factors)
        ]
        return self.compute_ms * np.stack(drawn, axis=1)
