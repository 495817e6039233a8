"""Averaging and steps on several hosts: what is measured and said, and the table that grows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from common.experiments.definitions import ROOT
from common.report.published import load_published
from scripts.benchmarks import hosts as bench
from scripts.benchmarks import tables
from scripts.benchmarks.arguments import StepArguments
from scripts.emulate import EmulateArguments, emulated_hosts, run_on
from tests.scripts.namespaces import needs_namespaces
from tests.waiting import LIMIT_S

AVERAGING = ["measure=averaging", "iterations=2", "tensor_mb=0.5", "tensors=2"]
SCALING = ["measure=scaling", "compute_ms=40", "payload_mb=0.1", "steps=2", "blocks=2"]
CASES = {  # (engine, topology): payloads that leave each of 2 hosts of 2 ranks in a step
    ("ours", "aer/staggered"): 0.5,
    ("ddp", "complete"): 2 * 3 / 4,  # a ring over all ranks
}


def run(*command: str) -> None:
    """Run a module in another process, which removes its emulated hosts even if this test's time is over."""
    known = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=known, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_scaling_under_torchrun(tmp_path: Path) -> None:
    chosen = "methods=allreduce,sgp_exp,decent_aer_accumulated"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    run(*launcher, bench.MODULE, *SCALING, chosen, f"output={tmp_path}")
    rows = pd.read_csv(tmp_path / "scaling.csv").set_index("method")
    labels = ["AllReduce", "SGP (Exp)", "Decent (AER), accumulated"]
    assert list(rows.index) == labels
    assert list(rows.engine) == ["ddp", "ours", "ours"]
    assert (rows.compute == "wait of 20 ms").all()
    assert (rows.hosts == 1).all()
    assert (rows.step_ms >= 20).all()
    assert list(rows.payload_mb) == pytest.approx([0.1] * 3, rel=0.02)
    assert "SGP (Exp) does not measure SGP's overhead" in (tmp_path / "scaling.md").read_text()


@pytest.mark.slow
@needs_namespaces
def test_averaging_on_emulated_hosts(tmp_path: Path) -> None:
    chosen = ["layouts=2x1", "mbit_per_s=400", "delay_ms=0", "limit_s=150", "topologies=allreduce,one_peer_ring"]
    run(bench.MODULE, *AVERAGING, *chosen, f"output={tmp_path}")
    rows = pd.read_csv(tmp_path / "communication.csv")
    assert (rows[["hosts", "mbit_per_s", "backend"]] == [2, 400, "gloo"]).all(axis=None)
    # Two tensors of 0.5 MB: 1 MB leaves a host, by either way between two; no faster than the wire, but its bursts.
    assert list(rows.bytes_per_host) == pytest.approx([1e6, 1e6], rel=0.1)
    assert (rows.seconds_per_iteration > 0.5 * 1e6 * 8 / 400e6).all()


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("engine", "topology"), CASES)
def test_bytes_that_leave_a_host_by_its_interface(tmp_path: Path, engine: str, topology: str) -> None:
    result = tmp_path / "result.json"
    settings = [f"engines={engine}", f"topologies={topology}", "models=digits_resnet", "compute_ms=1", "steps=12"]
    settings += ["bucket_mb=0.25", "peers_bucket_mb=0.25", "rounds=3", f"rows={result}"]
    program = ["-m", "scripts.benchmarks.measures", "measure=step", *settings]
    with emulated_hosts(EmulateArguments(hosts=2, ranks_per_host=2, mbit_per_s=0)) as cluster:
        assert run_on(cluster, 2, program, limit_s=240) == 0
    (measured,) = json.loads(result.read_text())
    expected = CASES[engine, topology] * measured["payload_mb"] * 1e6
    # Headers add 4 %; of 36 rounds one may be under way at the beginning or at the end.
    assert 0.96 * expected < measured["bytes_per_host"] < 1.09 * expected
    assert measured["step_ms"] > 0
    assert measured["startup_s"] > 0
    assert (measured["waited_ms"] is None) == (engine == "ddp")


# -- what is said above the tables


def test_what_is_said_of_the_published_sgp() -> None:
    published = load_published("figure6").frame()
    step_ms = published.pivot(index=["cluster", "workers"], columns="method", values="step_ms")
    assert (
        f"{(step_ms['SGP (Exp)'] / step_ms['Decent (Exp)']).max() - 1:.0%}".replace("%", " %") in tables.SAID["scaling"]
    )


def test_ratios_are_taken_within_one_cluster_and_compute_time() -> None:
    def record(engine: str, topology: str, step_ms: float, compute_ms: float = 400, rate: float = 200) -> dict:
        job = {"hosts": 4, "ranks_per_host": 2, "mbit_per_s": rate, "model": "gpt_5m", "condition": "even"}
        job |= {"engine": engine, "topology": topology, "bucket_mb": 2}
        more = {"bytes_per_host": 12.5e6, "waited_ms": None, "peak_mb": 300 + step_ms, "startup_s": 5.0 + rate}
        more |= {"ready_s": None}
        return job | more | {"step_ms": step_ms, "compute_ms": compute_ms}

    frame = tables.table(
        [
            record("ours", "aer/staggered", 600),
            record("ours", "aer/staggered", 1300, 1200),
            record("ours", "aer/staggered", 1100, rate=100),
            record("decent_dp", "complete", 900, rate=100),
            record("ours_torch", "complete", 900, rate=100),
            record("alone", "torch", 480),
            record("alone", "fused", 440),
            record("ddp", "complete", 2200),
            record("ddp", "complete", 2600, 1200),
            record("ddp", "complete", 4400, rate=100),
            record("decent_dp", "alternating-exp-ring", 1000),
        ]
    )
    assert frame.mbit_per_s.is_monotonic_increasing
    assert list(frame.engine[frame.mbit_per_s == 100]) == ["ddp", "decent_dp", "ours", "ours_torch"]
    ours = frame[frame.engine == "ours"].set_index(["mbit_per_s", "compute_ms"])
    assert ours.ratio_to_decent_dp[200, 400] == pytest.approx(0.6)
    assert ours.ratio_to_ddp[200, 400] == pytest.approx(600 / 2200)
    assert ours.ratio_to_ddp[200, 1200] == pytest.approx(0.5)
    assert ours.ratio_to_ddp[100, 400] == pytest.approx(0.25)
    assert ours.exposed_ms[200, 400] == pytest.approx(160)
    assert ours.ratio_to_decent_dp.isna().sum() == 2
    assert frame[frame.engine == "ddp"].ratio_to_decent_dp.isna().all()


SMALL = ["measure=step", "layouts=2x1", "topologies=torch,complete", "engines=alone,ddp"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """(engine, compute_ms) of what was measured, by something that takes no time."""
    calls: list[tuple[str, list[float]]] = []

    def measure(job: StepArguments) -> list[dict] | None:
        compute_ms = list(map(float, job.compute_ms.split(",")))
        calls.append((job.engines, compute_ms))
        if job.models == "gpt_30m":
            raise KeyboardInterrupt
        if job.models == "digits_resnet" and job.engines == "ddp":
            return None
        once = {"payload_mb": 25.0, "peak_mb": 300.0, "startup_s": 5.0, "first_step_s": 1.0, "ready_s": 6.0}
        each = {"step_ms_spread": 1.0, "bytes_per_host": 5e6, "waited_ms": None}
        return [{"compute_ms": ms, "step_ms": ms + len(calls), **each, **once} for ms in compute_ms]

    monkeypatch.setattr(bench, "on_emulated_hosts", measure)
    monkeypatch.setattr(bench, "end_like_an_interruption", lambda: None)
    return calls


def test_the_table_keeps_what_was_measured(tmp_path: Path, measured: list, capsys: pytest.CaptureFixture) -> None:
    def run(*settings: str) -> pd.DataFrame:
        assert bench.main([*SMALL, *settings, f"output={tmp_path}"]) == 0
        return pd.read_csv(tmp_path / "parallel.csv")

    first = run("compute_ms=400")
    assert measured == [("alone", [400]), ("ddp", [400])]
    assert list(first.engine) == ["alone", "ddp"]
    assert list(first.exposed_ms) == [0, 1]
    second = run("compute_ms=400,1200")
    assert measured[2:] == [("alone", [1200]), ("ddp", [1200])]
    kept = second[second.compute_ms == 400].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, first)
    page = (tmp_path / "parallel.md").read_text()
    assert "Made by `python -m scripts.benchmarks.hosts measure=step layouts=2x1" in page
    third = run("compute_ms=1200", "--again")
    assert measured[4:] == [("alone", [1200]), ("ddp", [1200])]
    assert list(third.step_ms) == [401, 402, 1205, 1206]
    # Another command adds to it, and keeps what it measured when it is interrupted or an engine fails.
    assert bench.main([*SMALL, "models=digits_resnet,gpt_30m", "compute_ms=0", f"output={tmp_path}"]) == 130
    after = pd.read_csv(tmp_path / "parallel.csv")
    assert list(after.model) == ["digits_resnet", *["gpt_5m"] * 4]
    pd.testing.assert_frame_equal(after[1:].reset_index(drop=True), third)
    assert bench.main([*SMALL, "models=digits_resnet", "compute_ms=0", f"output={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "failed, left out: hosts=2, ranks_per_host=1, mbit_per_s=200.0, model=digits_resnet" in said
    assert len(pd.read_csv(tmp_path / "parallel.csv")) == 5


def test_what_other_layouts_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    rows = [{"workers": 4}]
    monkeypatch.setattr(bench, "on_emulated_hosts", lambda place: None if place.layouts == "8x2" else rows)
    assert bench.main([*SCALING, f"output={tmp_path}", "layouts=2x2,8x2"]) == 1
    assert len(pd.read_csv(tmp_path / "scaling.csv")) == 1
    assert bench.main([*SCALING, f"output={tmp_path}", "layouts=8x2"]) == 2
    assert capsys.readouterr().err.endswith("layouts=8x2 mbit_per_s=200\nerror: nothing was measured\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rounds=3", "rows of alone with rounds=2, this is rounds=3"),
        ("peers_bucket_mb=4", "rows of alone with bucket_mb=5, this is bucket_mb=4.0"),
        ("machine", "rows of alone with machine=Abacus, 1 cores, this is machine="),
        ("commit", "rows of alone with commit=0123456789ab, this is commit="),
        ("columns", "parallel.csv has no commit; give another output"),
    ],
)
def test_a_table_is_of_one_machine_one_commit_and_one_setting(
    tmp_path: Path, measured: list, capsys: pytest.CaptureFixture, given: str, message: str
) -> None:
    assert bench.main([*SMALL, f"output={tmp_path}"]) == 0
    frame = pd.read_csv(tmp_path / "parallel.csv")
    if given == "machine":
        frame.assign(machine="Abacus, 1 cores").to_csv(tmp_path / "parallel.csv", index=False)
    if given == "commit":
        frame.assign(commit="0123456789ab").to_csv(tmp_path / "parallel.csv", index=False)
    if given == "columns":
        frame.drop(columns="commit").to_csv(tmp_path / "parallel.csv", index=False)
    before = (tmp_path / "parallel.csv").read_bytes()
    settings = [given] if "=" in given else []
    assert bench.main([*SMALL, "compute_ms=800", *settings, f"output={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "parallel.csv").read_bytes() == before
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--measure averaging topologies=allreduce,triangle", "topologies='allreduce,triangle': 'triangle': "),
        ("measure=averaging layouts=4", "layouts='4'"),
        ("measure=averaging layouts=4x2,70x1", "layouts='4x2,70x1'"),
        ("measure=scaling layouts=0x2", "layouts='0x2'"),
        ("--measure=step compute_ms=400,1.2.3", "compute_ms='400,1.2.3'"),
        ("measure=averaging iterations=0", "iterations=0"),
        ("measure=scaling methods=all", "methods='all': 'all': expected one of: allreduce"),
        ("measure=scaling blocks=1", "blocks=1"),
        ("measure=step engines=our", "engines='our': 'our': did you mean 'ours'?"),
        ("measure=step models=gpt_5", "models='gpt_5': 'gpt_5': did you mean 'gpt_5m'?"),
        ("measure=step topologies=aer,rign", "topologies='aer,rign': 'rign': did you mean 'ring'?"),
    ],
)
def test_bad_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(arguments.split()) == 2
    assert message in capsys.readouterr().err
