"""Predictions against known step times: calibration, and reading the measured table."""

import numpy as np
import pandas as pd
import pytest

from common.runtime.conditions import CONDITIONS
from common.runtime.figure6 import calibrate, predict_figure6
from common.runtime.links import allreduce_ms
from common.runtime.validation import predict_measured, read_topology
from tests.runtime.clusters import cluster


def test_calibration_finds_the_work_and_what_is_not_divided() -> None:
    """Link: 80 ms for S. 700/n + 20 ms are 107.5, 63.75, 41.875: only the first is more than the link's time."""
    step_ms = {8: 107.5, 16: (80 + 63.75) / 2, 32: (80 + 41.875) / 2}
    assert calibrate(cluster(workers_per_host=4), step_ms) == pytest.approx((700.0, 20.0), rel=1e-4)


def test_figure6_predicts_every_published_number() -> None:
    methods = ["AllReduce", "SGP (Exp)", "Decent (Exp)", "Decent (AER)"]
    cases = [(n, method) for n in (4, 8) for method in methods]
    published = pd.DataFrame(
        [
            {"cluster": "X, 2 per node, 10 Gbps", "workers": n, "method": m, "step_ms": 100.0 + 800.0 / n}
            for n, m in cases
        ]
    )
    frame, fitted = predict_figure6(published, payload_mb=100.0)
    assert fitted["X, 2 per node, 10 Gbps"] == pytest.approx((800.0, 100.0), rel=1e-3)  # all hidden: 80 ms across
    assert list(frame.method) == 2 * methods
    assert set(frame.used_as[frame.method == "Decent (AER)"]) == {"calibration"}
    decent = frame[frame.method.str.startswith("Decent")]
    assert decent.error_percent.abs().max() < 0.1
    # Eight workers, flat Exp: 1, 2 and 2 payloads leave a host in turn; the compute time is 200 ms.
    assert frame.predicted_flat_ms[6] == pytest.approx(200.0, rel=0.01)


DRAWN = {"warm_up": 6, "seed": 0}
# Measured on emulated hosts, 200 Mbit/s, 1 ms, S = 25.3 MB, AdamW; seconds per step.
MEASURED = [
    # engine, topology, (8 x 1: 1.2 s, 0.4 s), (4 x 2: 1.2 s, 0.4 s)
    ("alone", "torch", (1.305, 0.486), (1.287, 0.477)),
    ("ddp", "complete", (2.681, 2.235), (2.632, 2.188)),
    ("decent_dp", "complete", (1.85, 1.854), (1.854, 1.851)),
    ("decent_dp", "ring", (1.359, 1.108), (1.389, 1.152)),
    ("decent_dp", "one-peer-exp", (1.311, 1.082), (1.656, 1.487)),
    ("decent_dp", "aer", None, (1.320, 1.062)),
]


def measured() -> pd.DataFrame:
    rows = []
    for engine, topology, *layouts in MEASURED:
        for (hosts, L), seconds in zip([(8, 1), (4, 2)], layouts, strict=True):
            for compute_ms, value in zip((1200.0, 400.0), seconds or (), strict=False):
                rows.append(
                    {"engine": engine, "topology": topology, "hosts": hosts, "ranks_per_host": L, "model": "gpt",
                     "mbit_per_s": 200.0, "step_ms": 1000 * value, "compute_ms": compute_ms, "payload_mb": 25.3,
                     "condition": "even", "bucket_mb": 25 if engine == "ddp" else 5, "steps": 40, "rounds": 2}
                )  # fmt: skip
    return pd.DataFrame(rows)


def test_measured_step_times_are_predicted() -> None:
    frame, left_out = predict_measured(measured(), delay_ms=1.0, intra_gbps=8.0, **DRAWN)
    assert left_out == []
    assert len(frame) == 18
    assert frame.update_ms[0] == pytest.approx(105.0)
    assert frame.error_percent.abs().median() < 6
    assert frame.error_percent.abs().max() < 25


def test_buckets_are_set_in_mib() -> None:
    """25 MiB are 26.2144 MB: 26.2 MB of gradients are one bucket, which travels when all of them are ready."""
    rows = measured().iloc[[0, 4]].assign(payload_mb=26.2, step_ms=1200.0)
    frame, _ = predict_measured(rows, delay_ms=1.0, intra_gbps=8.0, **DRAWN)
    hosts = cluster(hosts=8, inter_gbps=0.2 * 1448 / 1514, latency_us=1000.0)
    assert frame.predicted_ms.item() == pytest.approx(1200.0 + allreduce_ms(hosts, 26.2))


@pytest.mark.parametrize(("hosts", "topology"), [(8, "aer/4/4"), (4, "aer/staggered/10/4")])
def test_local_steps_hide_their_messages_behind_a_round(hosts: int, topology: str) -> None:
    """An update alone takes 105 ms there; no message of a round that is merged after 4 updates is waited for."""
    alone = measured().iloc[[0]].assign(topology="fused", hosts=hosts, ranks_per_host=8 // hosts)
    local = alone.assign(engine="ours_local", topology=topology, bucket_mb=2.0)
    rows = pd.concat([alone, local], ignore_index=True)
    frame, left_out = predict_measured(rows, delay_ms=1.0, intra_gbps=8.0, **DRAWN)
    assert left_out == []
    assert frame.predicted_ms.item() == pytest.approx(1200.0 + 105.0)


def test_a_slow_host_holds_everybody_up() -> None:
    """Where nothing but computing takes time, gossip in every step waits for a slow host too: 1.5 times as long."""
    rows = measured().iloc[[4, 12]].assign(mbit_per_s=1e6, condition="slow_host")  # 8 x 1: DDP, gossip on a ring
    alone = measured().iloc[[0]]
    frame, _ = predict_measured(pd.concat([alone, rows], ignore_index=True), delay_ms=0.0, intra_gbps=1e6, **DRAWN)
    assert list(frame.predicted_ms) == pytest.approx([1.5 * 1200 + 105] * len(rows), rel=0.01)


def test_the_steps_that_are_predicted_are_those_that_were_timed() -> None:
    """Where nothing but computing takes time, all-reduce's step is that of the worker that computes longest in it."""
    rows = measured().iloc[[0, 4]].assign(mbit_per_s=1e6, condition=["even", "stalls"], steps=15, rounds=2)
    frame, _ = predict_measured(rows, delay_ms=0.0, intra_gbps=1e6, warm_up=3, seed=5)
    drawn = CONDITIONS["stalls"].on(cluster(hosts=8, compute_ms=1200.0)).draw_compute_ms(33, seed=5)
    assert frame.predicted_ms.item() == pytest.approx(drawn[3:].max(axis=1).mean() + 105, rel=0.001)


def test_rows_that_cannot_be_predicted_are_named() -> None:
    frame = measured()
    frame.loc[4, "compute_ms"] = np.nan
    frame.loc[5, "engine"] = "theirs"
    frame.loc[8, "topology"] = "triangle"
    frame.loc[9, "hosts"] = 16
    _, left_out = predict_measured(frame.iloc[:10], delay_ms=1.0, intra_gbps=8.0, **DRAWN)
    assert len(left_out) == 4
    assert "ddp, complete, 8 x 1, 200 Mbit/s: a real model's compute time" in left_out[0]
    assert any("'theirs': expected ddp, decent_dp, ours or ours_local" in reason for reason in left_out)
    assert any("topology 'triangle'" in reason for reason in left_out)
    assert "decent_dp, complete, 16 x 1, 200 Mbit/s: computing alone was not measured there" in left_out[3]


def test_missing_columns_are_named() -> None:
    with pytest.raises(ValueError, match="columns compute_ms, payload_mb are missing"):
        predict_measured(measured().drop(columns=["compute_ms", "payload_mb"]), delay_ms=1.0, intra_gbps=8.0, **DRAWN)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("aer", ("aer", False, False)),
        ("AER (staggered)", ("aer", False, True)),
        ("aer_staggered", ("aer", False, True)),
        ("one-peer-exponential between hosts", ("one_peer_exponential", True, False)),
        ("one_peer_exponential/between_hosts", ("one_peer_exponential", True, False)),
        ("aer/staggered", ("aer", False, True)),
        ("one-peer-exp", ("one_peer_exp", False, False)),
    ],
)
def test_labels_of_topologies(label: str, expected: tuple) -> None:
    assert read_topology(label) == expected
