"""Compares the topologies on a cluster: predicted step times, speed-up over all-reduce, mixing per second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from common.runtime.cluster import Cluster
from common.runtime.steps import simulate_allreduce, simulate_gossip
from common.topology import build

CANDIDATES = ("complete", "one_peer_exponential", "aer", "one_peer_ring", "ring", "static_exponential")
WORTH_IT = 1.05  # a smaller speed-up is within the model's error


@dataclass(frozen=True)
class Plan:
    """One row for each method that works on this cluster; `skipped` says why others do not."""

    frame: pd.DataFrame
    skipped: dict[str, str]

    @property
    def recommendation(self) -> str:
        """Which method to take, in words."""
        gossip = self.frame[self.frame.method == "gossip"]
        fast = gossip[gossip.speedup >= WORTH_IT * 1.0]
        if fast.empty:
            return (
                f"Stay with all-reduce: no topology is predicted to be more than {100 * (WORTH_IT - 1):.0f} % faster."
            )
        # Among those within 5 % of the fastest the one that mixes best.
        near = fast[fast.step_ms <= 1.05 * fast.step_ms.min()]
        best = near.loc[near.contraction_per_s.idxmax()]
        return f"Take {best.topology}: {best.step_ms:.1f} ms per step, {best.speedup:.2f} times as fast as all-reduce."


def plan(cluster: Cluster, topologies: Sequence[str] = CANDIDATES, *, steps: int = 200, seed: int = 0) -> Plan:
    """Simulate all-reduce and gossip on these topologies, with the same random compute times."""
    baseline = simulate_allreduce(cluster, steps=steps, seed=seed)
    rows = [_row("all-reduce", "complete", baseline.step, baseline.exposed, baseline.step, math.inf)]
    skipped = {}
    for name in topologies:
        try:
            topology = build(name, cluster.ranks, cluster.ranks_per_host)
        except ValueError as error:
            skipped[name] = str(error)
            continue
        times = simulate_gossip(cluster, topology, steps=steps, seed=seed)
        gap = topology.spectral_gap()
        contraction = math.inf if gap >= 1 else -math.log1p(-gap) / (times.step / 1000)
        rows.append(_row("gossip", name, times.step, times.exposed, baseline.step, contraction))
    return Plan(pd.DataFrame(rows), skipped)


def _row(method: str, topology: str, step: float, exposed: float, baseline: float, contraction: float) -> dict:
    return {
        "method": method,
        "topology": topology,
        "step_ms": step,
        "exposed_ms": exposed,
        "speedup": baseline / step,
        "contraction_per_s": contraction,  # e-folds of the disagreement between workers
    }
