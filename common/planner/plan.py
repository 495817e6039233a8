"""Comparison of topologies on a cluster: predicted step times, speed-up over all-reduce, mixing per second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from common.options import LocalSteps
from common.planner.cluster import Cluster
from common.planner.conditions import CONDITIONS
from common.planner.memory import rank_memory, sent_mb
from common.planner.steps import Phases, Times, simulate_allreduce, simulate_gossip, staggering_pays
from common.topology import Topology, build

CANDIDATES = ("complete", "one_peer_exponential", "aer", "one_peer_ring", "ring", "static_exponential")
WORTH_IT = 1.05  # a smaller speed-up is within the model's error
MOST_EIGENVALUES = 512  # the most workers for which a spectral gap takes less than a second


@dataclass(frozen=True)
class Plan:
    """One row for each method that exists on this cluster; `skipped` says why the others do not.

    Column sent_mb is what a rank sends in a round, memory_gb the prediction of `rank_memory`.
    """

    frame: pd.DataFrame
    skipped: dict[str, str]

    @property
    def recommendation(self) -> str:
        """A sentence that names the method to take."""
        gossip = self.frame[self.frame.method == "gossip"]
        fast = gossip[gossip.speedup >= WORTH_IT]
        if fast.empty:
            return (
                f"Stay with all-reduce: no topology is predicted to be more than {100 * (WORTH_IT - 1):.0f} % faster."
            )
        # The topology that mixes best among all within 5 % of the fastest; the faster of two that mix alike.
        near = fast[fast.step_ms <= 1.05 * fast.step_ms.min()].sort_values("step_ms")
        best = near.loc[near.contraction_per_s.fillna(0).idxmax()]
        how = "" if best.phases == "aligned" else f" with {best.phases} phases"
        times = f"{best.step_ms:.1f} ms per step, {best.speedup:.2f} times as fast as all-reduce"
        return f"Take {best.topology}{how}: {times}."


def plan(
    cluster: Cluster,
    topologies: Sequence[str] = CANDIDATES,
    local: LocalSteps | None = None,
    *,
    optimizer: str = "adamw",
    steps: int = 200,
) -> Plan:
    """Simulate all-reduce and gossip on these topologies, with the same random compute times.

    local:     local steps of gossip, None for a round in every step; all-reduce runs in every step
    optimizer: a key of `memory.STATE`
    If hosts have several workers, one-peer topologies are also tried between hosts, with complete averaging inside.
    Topologies that send more evenly with staggered phases are tried with both kinds of phases.
    """
    baseline = simulate_allreduce(cluster, steps=steps)
    memory = rank_memory(cluster, optimizer) | {"messages": 0.0}  # gradients are averaged in place
    rows = [_row("all-reduce", "complete", "aligned", baseline, math.inf, sent_mb(cluster, None), memory)]
    skipped = {}
    for name in topologies:
        try:
            rows += _gossip(cluster, name, local, optimizer, steps)
        except ValueError as error:
            skipped[name] = str(error)
    frame = pd.DataFrame(rows)
    frame.insert(frame.columns.get_loc("exposed_ms") + 1, "speedup", baseline.step / frame.step_ms)
    return Plan(frame, skipped)


def sensitivity(
    cluster: Cluster, topologies: Sequence[str] = CANDIDATES, local: LocalSteps | None = None, *, steps: int = 200
) -> pd.DataFrame:
    """Return the rows of `plan` and, for each condition, (time of a step) / (time of a step with even computing).

    A gossip step waits for few workers, all-reduce for all; but over many steps slowness reaches every worker.
    """
    frames = {
        name: plan(condition.on(cluster), topologies, local, steps=steps).frame
        for name, condition in CONDITIONS.items()
    }
    even = frames.pop("even")
    ratios = {name: frame.step_ms / even.step_ms for name, frame in frames.items()}
    return even[["method", "topology", "phases"]].assign(**ratios)


def _gossip(cluster: Cluster, name: str, local: LocalSteps | None, optimizer: str, steps: int) -> list[dict]:
    """Return a row for each way in which this topology can be used."""
    n, L = cluster.workers, cluster.workers_per_host
    found: list[tuple[str, Topology | None, Phases, float]]
    if name == "complete":
        found = [(name, None, "aligned", 1.0)]  # its round has n^2 weights
    else:
        topology = build(name, n, L)
        gap = _spectral_gap(topology)
        found = [(name, topology, "aligned", gap)]
        if staggering_pays(topology, L):
            found.append((name, topology, "staggered", gap))  # the same rounds in another order
    if name.startswith("one_peer") and L > 1 and cluster.hosts > 1:
        between = build(name, n, L, between_hosts=True)
        gap = _spectral_gap(build(name, cluster.hosts))  # averaging inside adds eigenvalues 0
        found.append((f"{name} between hosts", between, "aligned", gap))
    rows = []
    for label, candidate, phases, candidate_gap in found:
        times = simulate_gossip(cluster, candidate, phases=phases, local=local, steps=steps)
        round_s = (1 if local is None else local.steps) * times.step / 1000
        contraction = math.inf if candidate_gap >= 1 else -math.log1p(-candidate_gap) / round_s
        memory = rank_memory(cluster, optimizer, candidate, local)
        rows.append(_row("gossip", label, phases, times, contraction, sent_mb(cluster, candidate), memory))
    return rows


def _spectral_gap(topology: Topology) -> float:
    return topology.spectral_gap() if topology.world_size <= MOST_EIGENVALUES else math.nan


def _row(
    method: str, topology: str, phases: str, times: Times, contraction: float, sent: float, memory: dict[str, float]
) -> dict:
    return {
        "method": method,
        "topology": topology,
        "phases": phases,
        "step_ms": times.step,
        "exposed_ms": times.exposed,
        "contraction_per_s": contraction,  # e-folds of the disagreement between workers; nan: not computed
        "sent_mb": sent,
        "memory_gb": sum(memory.values()) / 1000,
    }
