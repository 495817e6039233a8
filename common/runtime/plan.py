"""Compares the topologies on a cluster: predicted step times, speed-up over all-reduce, mixing per second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from common.runtime.cluster import Cluster
from common.runtime.exchange import complete
from common.runtime.mixing import gap_per_round
from common.runtime.steps import Phases, Times, simulate_allreduce, simulate_exchanges, simulate_gossip
from common.topology import Round, Topology, build

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
        fast = gossip[gossip.speedup >= WORTH_IT]
        if fast.empty:
            return (
                f"Stay with all-reduce: no topology is predicted to be more than {100 * (WORTH_IT - 1):.0f} % faster."
            )
        # Among those within 5 % of the fastest the one that mixes best; the faster one where they mix alike.
        near = fast[fast.step_ms <= 1.05 * fast.step_ms.min()].sort_values("step_ms")
        best = near.loc[near.contraction_per_s.fillna(0).idxmax()]
        how = "" if best.phases == "aligned" else f" with {best.phases} phases"
        times = f"{best.step_ms:.1f} ms per step, {best.speedup:.2f} times as fast as all-reduce"
        return f"Take {best.topology}{how}: {times}."


def between_hosts(topology: Topology, ranks_per_host: int) -> Topology:
    """The topology over hosts, with a complete average inside each: rounds M (x) J_L/L."""
    L = ranks_per_host
    rounds = []
    for round_ in topology.sample:
        rows = ({L * host + place: w / L for host, w in row.items() for place in range(L)} for row in round_.weights)
        rounds.append(Round(tuple(row for row in rows for _ in range(L))))
    name = f"{topology.name} between hosts"
    return Topology(name, topology.world_size * L, L, schedule=tuple(rounds))


def plan(cluster: Cluster, topologies: Sequence[str] = CANDIDATES, *, steps: int = 200, seed: int = 0) -> Plan:
    """Simulate all-reduce and gossip on these topologies, with the same random compute times.

    Where hosts have several ranks, one-peer topologies are also tried between hosts, complete inside; aer also with
    staggered phases.
    """
    baseline = simulate_allreduce(cluster, steps=steps, seed=seed)
    rows = [_row("all-reduce", "complete", "aligned", baseline, baseline, math.inf)]
    skipped = {}
    for name in topologies:
        try:
            rows += _gossip(cluster, name, baseline, steps, seed)
        except ValueError as error:
            skipped[name] = str(error)
    return Plan(pd.DataFrame(rows), skipped)


def _gossip(cluster: Cluster, name: str, baseline: Times, steps: int, seed: int) -> list[dict]:
    n, L = cluster.ranks, cluster.ranks_per_host
    if name == "complete":  # its rounds have n^2 weights
        exchange = complete(cluster)
        times = simulate_exchanges(cluster, lambda t: exchange, steps=steps, seed=seed)
        return [_row("gossip", name, "aligned", times, baseline, math.inf)]
    topology = build(name, n, L)
    gap = gap_per_round(topology)
    found: list[tuple[Topology, Phases, float]] = [(topology, "aligned", gap)]
    if name == "aer" and topology.period > 1:
        found.append((topology, "staggered", gap))  # the same rounds in another order
    if name.startswith("one_peer") and L > 1 and cluster.hosts > 1:
        hosts = build(name, cluster.hosts)
        found.append((between_hosts(hosts, L), "aligned", gap_per_round(hosts)))  # J_L/L adds eigenvalues 0
    rows = []
    for candidate, phases, candidate_gap in found:
        times = simulate_gossip(cluster, candidate, phases=phases, steps=steps, seed=seed)
        contraction = math.inf if candidate_gap >= 1 else -math.log1p(-candidate_gap) / (times.step / 1000)
        rows.append(_row("gossip", candidate.name, phases, times, baseline, contraction))
    return rows


def _row(method: str, topology: str, phases: str, times: Times, baseline: Times, contraction: float) -> dict:
    return {
        "method": method,
        "topology": topology,
        "phases": phases,
        "step_ms": times.step,
        "exposed_ms": times.exposed,
        "speedup": baseline.step / times.step,
        "contraction_per_s": contraction,  # e-folds of the disagreement between workers; not known: nan
    }
