"""Topologies as data, for drawing and for predicting step times, and data that the page's own model is checked against.

The page computes predictions itself, by the formulas of common.planner; it gets the transport of every round and the
random numbers behind compute times.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from common.experiments.collect import Collection
from common.experiments.runs import FinishedRun
from common.explorer.records import Pool, names_of, short, shorts
from common.planner.cluster import Cluster, Variation
from common.planner.plan import CANDIDATES, plan
from common.planner.steps import DISCARDED, staggering_pays
from common.topology import NAMES, Round, Topology, Transport, build, bytes_leaving_hosts, staggered, transport_of

WORKERS, PER_HOST = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64), (1, 2, 4, 8)
STEPS = 60  # of a prediction on the page
BETAS = (0.0, 0.9)  # without momentum, and with the usual one
FORGOTTEN = 1e-12  # squared norm below which a displacement no longer counts
EXAMPLES = [  # settings of the page's sliders, for its table and its tests
    {"hosts": 4, "per_host": 2, "mbit": 10_000, "delay": 0.02, "million": 350, "compute": 300, "jitter": 0.05},
    {"hosts": 8, "per_host": 1, "mbit": 1_000, "delay": 0.5, "million": 25, "compute": 100, "jitter": 0.1},
    {"hosts": 4, "per_host": 8, "mbit": 25_000, "delay": 0.05, "million": 124, "compute": 60, "jitter": 0.0},
    {"hosts": 16, "per_host": 1, "mbit": 200, "delay": 1, "million": 1, "compute": 50, "jitter": 0.3},
]


def topologies() -> dict[str, Any]:
    """Return every family on some numbers of workers and hosts: rounds as they travel, spectral gap, consensus.

    {families: {family: {"n/L": {period, rounds, staggered, gap, consensus, spread}}}, shared: rounds, candidates}, with
    L workers per host; `rounds` and `staggered` are lists of places in `shared`, `spread` is `amplification` for BETAS.
    """
    pool, found = Pool(), dict[str, dict[str, Any]]()
    for name in (name for name in NAMES if name != "file"):
        for options in ({}, {"between_hosts": True}) if name.startswith("one_peer") else ({},):
            label = f"{name} between hosts" if options else name
            for n in WORKERS:
                for size in (size for size in PER_HOST if n % size == 0 and size < n):
                    if options and size == 1:
                        continue
                    try:
                        topology = build(name, n, size, **options)
                    except ValueError:  # it does not exist for this many workers
                        continue
                    found.setdefault(label, {})[f"{n}/{size}"] = _topology(topology, pool)
    return {"families": found, "shared": pool.kept, "candidates": list(CANDIDATES)}


def _topology(topology: Topology, pool: Pool) -> dict[str, Any]:
    size = topology.workers_per_host
    pays = topology.period is not None and staggering_pays(topology, size)
    shown = topology.sample[:4] if topology.period is None else topology.sample
    return {
        "period": topology.period,
        "rounds": [pool.add(travelling(round_, size)) for round_ in shown],
        "staggered": [pool.add(travelling(round_, size)) for round_ in staggered(topology).sample] if pays else None,
        "gap": short(topology.spectral_gap()),
        "consensus": topology.rounds_to_consensus(limit=2000),
        "spread": None
        if "between_hosts" in topology.options
        else shorts(amplification(topology.name, topology.world_size, size, beta=beta) for beta in BETAS),
    }


def travelling(round_: Round, size: int) -> dict[str, Any]:
    """Return how a round travels with `size` workers on a host: its transport, and groups or edges of agents.

    Agents are hosts in hierarchical rounds, else workers. Edges are one list [sender, receiver, ...], or `offsets` o if
    every agent i sends to i + o. `leaving`: payloads that each host sends to others in all-reduces.
    """
    kind = transport_of(round_, size)
    if kind is Transport.IDLE:
        return {"kind": "idle"}
    agents = round_.between_hosts(size) if kind is Transport.HIERARCHICAL else round_
    found: dict[str, Any] = {"kind": kind.value, "agents": agents.world_size}
    if transport_of(agents) is Transport.SUBGROUP:
        found["groups"] = [list(group) for group in agents.groups]
        if kind is Transport.SUBGROUP:
            leaving = bytes_leaving_hosts(agents, size, 1.0, kind)
            found["leaving"] = [leaving.get(host, 0.0) for host in range(agents.world_size // size)]
        return found
    n = agents.world_size
    offsets = [tuple((j - i) % n for j in agents.out_peers(i)) for i in range(n)]
    if len({frozenset(of) for of in offsets}) == 1:
        return found | {"offsets": sorted(offsets[0])}
    return found | {"edges": [end for i in range(n) for j in agents.out_peers(i) for end in (i, j)]}


@cache
def amplification(name: str, n: int, size: int, order: str = "awc", beta: float = 0.0) -> float:
    """Return the factor by which a topology spreads workers, relative to a single displacement.

    beta: correlation of a worker's displacement with its next one, as momentum makes it

    If displacements of different workers are independent and of equal size, the squared consensus distance is that of
    one displacement times sum_kl beta^|k-l| <P_k - J, P_l - J> / (n - 1), averaged over a period. P_k are the last k
    rounds, from P_0 = I on (order awc) or from P_1 on (atc). For random matchings it is the root mean square for
    beta = 0. The formula is not from a paper.
    """
    topology = build(name, n, size)
    if topology.period is None:
        left = topology.schedule.contraction() ** 2
        return math.sqrt((1 if order == "awc" else left) / (1 - left))
    total, matrices = 0.0, [round_.matrix() for round_ in topology.schedule]
    for phase in range(topology.period):
        P, earlier = np.eye(n) - 1 / n, np.zeros((n, n))
        for k in range(200 * n * n):
            if (P**2).sum() < FORGOTTEN:
                break
            if k or order == "awc":
                total += float((P * (P + 2 * earlier)).sum())
                earlier = beta * (earlier + P)
            P = P @ matrices[(phase - k) % topology.period]
    return math.sqrt(max(0.0, total) / topology.period / (n - 1))


def distances(collections: Sequence[Collection]) -> list[dict[str, Any]]:
    """Return measured and predicted consensus distances of rows.

    For each table, variant, optimizer, order and number of workers, the row with the smallest learning rate x
    amplification gives the scale: displacements are taken to be proportional to the learning rate.
    """
    found: list[dict[str, Any]] = []
    for collection in collections:
        alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row, name in zip(collection.table.rows, names_of(collection.table.rows), strict=True):
            for variant in collection.table.variants or [None]:
                runs = [run for run in collection.of(row.name, variant) if run.total("consensus_distance") > 0]
                setting = runs and _setting(runs[0])
                if not setting:
                    continue
                key, factor, topology = setting
                measured = float(np.mean([run.total("consensus_distance") for run in runs]))
                about = {"table": collection.table.name, "row": row.name, "name": name, "variant": variant or ""}
                line = about | topology | {"seeds": len(runs), "measured": measured, "factor": factor}
                alike.setdefault((*key, variant), []).append(line)
        for lines in alike.values():
            scale = min(lines, key=lambda line: line["factor"])
            for line in lines if len(lines) > 1 else ():
                predicted = scale["measured"] / scale["factor"] * line["factor"]
                more = {"predicted": predicted, "scale": line is scale, "measured": line["measured"]}
                found.append({k: short(v) for k, v in (line | more).items() if k != "factor"})
    return found


def _setting(run: FinishedRun) -> tuple[tuple[Any, ...], float, dict[str, Any]] | None:
    """Return what must be alike, rate x amplification, and the topology; None where the model does not apply."""
    config, parallel = run.config, run.config.get("parallel", {})
    if parallel.get("method") != "decentralized" or (parallel.get("local_steps") or 1) > 1:
        return None
    optimizer, order = config.get("optimizer", {}), parallel.get("order", "awc")
    options, workers = dict(config["topology"]), config["workers"]
    name, n, size = options.pop("name"), workers["count"], workers["per_host"]
    if name == "file" or any(value not in (None, False, 0) for key, value in options.items() if key != "k"):
        return None
    first = (optimizer.get("betas") or [optimizer.get("momentum", 0.0)])[0]
    beta = first ** (1 / (optimizer.get("accumulation_steps") or 1))  # per step; moments are updated once every s steps
    factor = float(optimizer.get("lr", 0)) * amplification(name, n, size, order, beta)
    key = (optimizer.get("name"), order, n, optimizer.get("accumulation_steps"), bool(optimizer.get("momentum_mixing")))
    return (key, factor, {"family": name, "workers": n, "per_host": size}) if factor > 1e-9 else None


def planner() -> dict[str, Any]:
    """Return the planner's random numbers, [workers][steps], and what common.planner predicts for some settings."""
    most = max(WORKERS)
    normal = [Variation(seed=(0, worker)).normal.standard_normal(STEPS).tolist() for worker in range(most)]
    examples = [{"settings": settings, "steps": list(_predictions(settings))} for settings in EXAMPLES]
    fields = {field: getattr(Cluster, field) for field in ("backward_share", "bucket_mb", "gossip_bucket_mb")}
    fields |= {field: getattr(Cluster, field) for field in ("intra_gbps", "intra_latency_us")}
    return {"normal": normal, "steps": STEPS, "discarded": DISCARDED, "cluster": fields, "examples": examples}


def cluster_of(settings: dict[str, float]) -> Cluster:
    """Return the cluster that the page's sliders set: Mbit/s between hosts, delay in ms, million fp32 parameters."""
    return Cluster(
        hosts=int(settings["hosts"]),
        workers_per_host=int(settings["per_host"]),
        payload_mb=4 * settings["million"],
        compute_ms=settings["compute"],
        jitter=settings["jitter"],
        inter_gbps=settings["mbit"] / 1000,
        latency_us=1000 * settings["delay"],
    )


def _predictions(settings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the time of a step, in ms to ten digits, for each method that `plan` tries."""
    for row in plan(cluster_of(settings), steps=STEPS).frame.itertuples():
        way = f"{row.topology}, staggered" if row.phases == "staggered" else row.topology
        compute = row.step_ms - row.exposed_ms
        times = {"step": float(f"{row.step_ms:.10g}"), "compute": float(f"{compute:.10g}")}
        yield {"method": way if row.method == "gossip" else row.method, **times}
