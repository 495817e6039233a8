"""The benchmark of strong scaling: the emulated computing, what it writes, and what it skips."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.cli import UsageError
from common.experiments.definitions import ROOT
from common.planner.cluster import Cluster
from common.planner.conditions import CONDITIONS, Condition
from common.report.published import load_published
from scripts.benchmarks.arguments import ScalingArguments
from scripts.benchmarks.engines import Layers
from scripts.benchmarks.hosts import main
from scripts.benchmarks.measures import share_of_batch
from scripts.benchmarks.tables import SGP, conclude
from scripts.emulate import compute as emulated_compute
from scripts.emulate.compute import EmulatedCompute, Waiter


class Clock:
    """Time that passes only in sleeps, which take a tenth too long."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += 1.1 * seconds


def test_gradients_come_one_after_another_last_layer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(emulated_compute, "time", clock)
    layers = Layers(0.32, samples=3, device=torch.device("cpu"))
    assert sum(p.numel() for p in layers.parameters()) == 80_000
    model = EmulatedCompute(layers, compute_ms=120.0, backward_share=0.5)
    order = []
    for index, weight in enumerate(layers.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, i=index: order.append((i, clock.perf_counter())))
    loss = model()
    assert clock.perf_counter() == pytest.approx(0.060, abs=0.001)
    loss.backward()
    assert clock.perf_counter() == pytest.approx(0.120, abs=0.001)
    assert [index for index, _ in order] == [7, 6, 5, 4, 3, 2, 1, 0]
    every = 0.060 / 8
    assert [when for _, when in order] == pytest.approx([0.060 + every * i for i in range(1, 9)], abs=0.002)


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)


def waits(model: EmulatedCompute, steps: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Seconds that each step wants to wait."""
    wanted = []
    monkeypatch.setattr(Waiter, "wait", lambda self, seconds: wanted.append(seconds))
    found = []
    for _ in range(steps):
        wanted.clear()
        model().backward()
        found.append(sum(wanted))
    return np.array(found)


def test_jitter_is_lognormal_of_the_same_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    varying = Condition("varying", variation=0.5)
    models = [
        EmulatedCompute(layer, 100.0, condition=varying, factor=2.0, seed=seed) for seed in ((0, 1), (0, 1), (0, 2))
    ]
    one, same, other = (waits(model, 2000, monkeypatch) for model in models)
    assert np.array_equal(one, same)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
    assert one.mean() == pytest.approx(0.2, rel=0.05)
    assert one.std() / one.mean() == pytest.approx(0.5, rel=0.05)
    assert np.log(one).std() == pytest.approx(varying.jitter, rel=0.05)


def test_some_steps_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    stalling = Condition("stalling", stall_share=0.1, stall_factor=10.0)
    model = EmulatedCompute(nn.Linear(2, 2), 100.0, condition=stalling, seed=(0, 3))
    steps = waits(model, 2000, monkeypatch)
    assert set(np.round(steps, 9)) == {0.1, 1.0}
    assert (steps > 0.5).mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_emulated_is_what_is_predicted(
    condition: Condition, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = condition.on(Cluster(hosts=2, workers_per_host=2, compute_ms=100.0)).draw_compute_ms(200, seed=7)
    factor = condition.slow_host if rank < 2 else 1.0
    model = EmulatedCompute(nn.Linear(2, 2), 100.0, condition=condition, factor=factor, seed=(7, rank))
    assert waits(model, 200, monkeypatch) == pytest.approx(predicted[:, rank] / 1000)


@pytest.mark.parametrize(("rank", "compute_s"), [(1, 0.1), (2, 0.15), (3, 0.15)])
def test_a_slow_host_waits_longer(rank: int, compute_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank)
    arguments = ScalingArguments(measure="scaling", compute_ms=400, slow_host="2@1.5")
    module, compute = share_of_batch(arguments, torch.device("cpu"), L=2)
    assert compute == "wait of 100 ms, host 2 1.5 times slower"
    assert waits(module, 2, monkeypatch) == pytest.approx(compute_s)
    with pytest.raises(UsageError, match="slow_host=3@2: expected a host from 1 to 2"):
        share_of_batch(ScalingArguments(measure="scaling", slow_host="3@2"), torch.device("cpu"), L=2)


def test_real_computing_divides_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank=0)
    module, compute = share_of_batch(
        ScalingArguments(measure="scaling", compute_ms=0, samples=10, payload_mb=0.32), torch.device("cpu"), 2
    )
    assert compute == "8 linear layers, 3 samples"
    assert module.inputs.shape == (3, 100)
    module().backward()
    assert all(p.grad.norm() > 0 for p in module.parameters())


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    small = [
        "compute_ms=40",
        "jitter=0.1",
        "slow_host=1@1.5",
        "payload_mb=0.1",
        "steps=2",
        "blocks=2",
        f"output={tmp_path}",
    ]
    chosen = ["methods=allreduce,sgp_exp,decent_exp,decent_aer,decent_exp_between_hosts"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "scripts.benchmarks.hosts", "measure=scaling", *small, *chosen],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with (tmp_path / "scaling.csv").open() as table:
        rows = {row["method"]: row for row in csv.DictReader(table)}
    assert set(rows) == {"AllReduce", "SGP (Exp)", "Decent (Exp)", "Decent (AER)", "Decent (Exp between hosts)"}
    for row in rows.values():
        assert row["engine"] == ("ddp" if row["method"] == "AllReduce" else "ours")
        assert row["compute"] == "wait of 20 ms, jitter 0.1, host 1 1.5 times slower"
        assert float(row["step_ms"]) >= 20
        assert float(row["payload_mb"]) == pytest.approx(0.1, rel=0.02)
    assert "SGP (Exp) does not measure SGP's overhead" in (tmp_path / "scaling.md").read_text()


def test_speed_ups_are_of_equal_layouts() -> None:
    place = {"hosts": 2, "ranks_per_host": 2, "mbit_per_s": 200.0}
    rows = [
        place | {"workers": workers, "method": method, "step_ms": ms}
        for workers, method, ms in ((4, "AllReduce", 90.0), (4, "Decent (AER)", 60.0), (8, "AllReduce", 50.0))
    ]
    arguments = ScalingArguments(measure="scaling", methods="allreduce,decent_aer,sgp_exp")
    paragraphs = conclude(arguments, rows)
    assert paragraphs[1] == "Times as fast as all-reduce: 4 workers: Decent (AER) 1.50."
    assert paragraphs[2].endswith("SGP (Exp).")


def test_what_is_said_of_the_published_sgp() -> None:
    published = (
        load_published("figure6").frame().pivot(index=["cluster", "workers"], columns="method", values="step_ms")
    )
    assert f"{(published['SGP (Exp)'] / published['Decent (Exp)']).max() - 1:.0%}".replace("%", " %") in SGP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods=all"], "methods=all: 'all': expected one of: allreduce"),
        (["blocks=1"], "blocks=1"),
        (["layouts=2by2"], "layouts='2by2'"),
        (["slow_host=2"], "slow_host=2: "),
        (["compute_ms=0", "jitter=0.1"], "compute_ms=0: jitter"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure=scaling", *arguments]) == 2
    assert message in capsys.readouterr().err
