"""The predictions that results/benchmarks keeps beside measured and published step times are those of the planner."""

import pandas as pd
import pytest

from common.experiments.definitions import ROOT
from common.options import LocalSteps
from common.planner import Cluster, simulate_allreduce, simulate_gossip
from common.planner.conditions import CONDITIONS
from common.planner.plan import plan
from common.topology import build

RECORDS = ROOT / "results" / "benchmarks"
KEY = ["engine", "model", "hosts", "ranks_per_host", "mbit_per_s", "topology", "compute_ms", "condition"]
THEIRS = {"ring": "one_peer_ring", "one-peer-exp": "hypercube", "alternating-exp-ring": "aer"}  # decent-dp's names
FRAMING = 1448 / 1514  # payload of a full Ethernet frame; rate limits count whole frames
WARM_UP = 6  # steps before the timed ones


def predicted_ms(row: pd.Series) -> float:
    """Predict a measured step: nothing is fitted to it but the time of the update, which was measured alone."""
    cluster = Cluster(
        hosts=row.hosts,
        workers_per_host=row.ranks_per_host,
        payload_mb=row.payload_mb,
        compute_ms=row.compute_ms,
        update_ms=row.compute_ms + row.update_ms - row.compute_ms,  # to the last bit: messages may begin at one time
        inter_gbps=row.mbit_per_s / 1000 * FRAMING,
        intra_gbps=8.0,
        latency_us=1000.0,
        bucket_mb=row.bucket_mb * 2**20 / 1e6,
        gossip_bucket_mb=row.bucket_mb * 2**20 / 1e6,
    )
    cluster = CONDITIONS[row.condition].on(cluster)
    timed = {"steps": WARM_UP + row.steps * row.rounds, "discarded": WARM_UP, "seed": 0}
    if row.engine == "ddp":
        return simulate_allreduce(cluster, **timed).step
    name, *options = row.topology.split("/")
    topology = build(
        THEIRS.get(name, name), cluster.workers, row.ranks_per_host, between_hosts="between_hosts" in options
    )
    if row.engine == "decent_dp":
        return simulate_gossip(cluster, topology, flat=True, **timed).step
    local = [int(option) for option in options if option.isdecimal()]
    phases = "staggered" if "staggered" in options else "aligned"
    return simulate_gossip(cluster, topology, phases=phases, local=LocalSteps(*local) if local else None, **timed).step


@pytest.mark.parametrize(("record", "rows", "median"), [("parallel", 90, 5.6), ("uneven", 40, 2.1)])
def test_measured_steps(record: str, rows: int, median: float) -> None:
    measured = pd.read_csv(RECORDS / f"{record}.csv")[[*KEY, "payload_mb", "bucket_mb", "steps", "rounds"]]
    kept = pd.read_csv(RECORDS / f"{record}_prediction.csv").merge(measured, on=KEY)
    assert len(kept) == rows
    found = kept.apply(predicted_ms, axis=1)
    pd.testing.assert_series_equal(found, kept.predicted_ms, rtol=1e-4, check_names=False)
    assert (found / kept.measured_ms - 1).abs().median() * 100 == pytest.approx(median, abs=0.05)


def test_many_workers() -> None:
    kept = pd.read_csv(RECORDS / "extrapolation.csv")
    for hosts in (2, 8):
        cluster = Cluster(
            hosts=hosts, workers_per_host=8, payload_mb=500, compute_ms=150, update_ms=5, jitter=0.05,
            inter_gbps=100, intra_gbps=1000, latency_us=20,
        )  # fmt: skip
        frame = plan(cluster, ("complete", "one_peer_exponential", "aer", "ring"), steps=60).frame
        columns = ["method", "topology", "phases", "step_ms", "exposed_ms", "speedup"]
        same = kept[kept.hosts == hosts][columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(frame[columns], same, rtol=1e-4)
