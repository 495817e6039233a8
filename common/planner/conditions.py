"""How unevenly workers compute: arXiv 2410.11998 says that gossip suffers less from it than all-reduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.planner.cluster import Cluster, Variation


@dataclass(frozen=True)
class Condition:
    """Compute times of the workers, relative to workers that all compute alike.

    variation:    coefficient of variation of a step's compute time (lognormal, the mean stays)
    slow_host:    how many times longer the first host computes
    stall_share:  share of a worker's steps that stall
    stall_factor: how many times longer a stalled step takes
    """

    label: str
    variation: float = 0.0
    slow_host: float = 1.0
    stall_share: float = 0.0
    stall_factor: float = 1.0

    @property
    def jitter(self) -> float:
        """Standard deviation of the logarithm of a compute time."""
        return math.sqrt(math.log1p(self.variation**2))

    def variation_of(self, factor: float, seed: Sequence[int]) -> Variation:
        """Return the compute times of a worker on a host that is `factor` times slower."""
        return Variation(self.jitter, self.stall_share, self.stall_factor, factor, seed=seed)

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with compute times like these."""
        return replace(
            cluster,
            jitter=self.jitter,
            slow_hosts={0: self.slow_host} if self.slow_host != 1 else {},
            stall_share=self.stall_share,
            stall_factor=self.stall_factor,
        )


CONDITIONS = {
    "even": Condition("all alike"),
    "jitter_10": Condition("varying by 10 %", variation=0.1),
    "jitter_30": Condition("varying by 30 %", variation=0.3),
    "slow_host": Condition("one host 1.5 times slower", slow_host=1.5),
    "stalls": Condition("1 % of steps 10 times longer", stall_share=0.01, stall_factor=10.0),
}
