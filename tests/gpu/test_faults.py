"""Faults planted into the engine, the optimizers and the training loop are found; crashes leave a row in the record."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.optim import AccumAdam, AccumAdamW, accum_adam, flat_state
from common.parallel.gossip.exchange import ReceiveBuffers
from common.parallel.gossip.hierarchical import HierarchicalByCollectives
from common.parallel.gossip.mixer import Mixer
from common.parallel.gossip.point_to_point import SendRecv
from common.record.run_folder import RunFolder
from tests.distributed.scenarios import Scenario, in_process
from tests.gpu import test_host_syncs, test_memory, test_optimizers, test_races, test_ranks, test_speed, training
from tests.gpu.device import Device
from tests.gpu.test_races import queued  # noqa: F401

CPU = Device("cpu")
AER = {"topology": "aer", "workers_per_host": 2}
update, update_compiled = accum_adam.update_lists, flat_state.update_compiled
launch, wait_for, append = Mixer.launch, HierarchicalByCollectives._wait_for, RunFolder.append


def larger_steps(*lists: Any, k: int, hyper: Any) -> None:
    update(*lists, k=k, hyper=dataclasses.replace(hyper, lr=1.2 * hyper.lr))


def next_correction(vectors: Any, k: int, *others: Any) -> None:
    update_compiled(vectors, k + 1, *others)


def reading(*arguments: Any) -> Tensor:
    norm = clip_grad_norm_(*arguments)
    norm.item()
    return norm


def writing(mixer: Mixer, fragment: int = 0, *, writable: bool = False) -> None:
    launch(mixer, fragment, writable=writable)
    for vector in mixer.vectors:
        vector.data.mul_(0.999)


def impatient(exchange: HierarchicalByCollectives, timeout: Any, *works: list) -> None:
    if hasattr(exchange, "skipped"):
        wait_for(exchange, timeout, *works)
    else:
        exchange.skipped = works


def halved(folder: RunFolder, row: dict) -> None:
    append(folder, row | ({"time_step_ms": row["time_step_ms"] / 2} if row["split"] == "train" else {}))


def step_times(folder: Path) -> None:
    assert test_speed.step_times(CPU, folder)[0] == pytest.approx(1, abs=0.2)


def versions(version: str, *update: Any) -> Callable[[Path], object]:
    return lambda _: test_optimizers.difference(CPU, version, *update)


def races(gossip: dict[str, object], fused: bool) -> Callable[[Path], object]:
    return lambda _: test_races.compare(CPU, gossip, fused)


# What is replaced by what, what finds it, and what it says. With "GPU" in its name on the engine's path for GPUs.
SKIPPED_WAIT = (Mixer, "_wait", lambda *_: None)
MOVED = "late messages change parameters"
FAULTS = {
    "update": (
        accum_adam, "update_lists", larger_steps, versions("foreach", AccumAdamW, torch.float32, 3), "foreach",
    ),
    "fused update": (
        flat_state, "update_compiled", next_correction, versions("fused", AccumAdam, torch.float32, 1), "fused, Acc",
    ),
    "sync": (
        training, "clip_grad_norm_", reading, lambda _: test_host_syncs.watch_steps(CPU, "fp32", False), "waits for",
    ),
    "message read early": (*SKIPPED_WAIT, races(test_races.GOSSIP[0], False), MOVED),
    "parameters written while sent, slow": (Mixer, "launch", writing, races(test_races.GOSSIP[0], False), MOVED),
    "message read early, GPU": (*SKIPPED_WAIT, races({"topology": "ring"}, True), MOVED),
    "collective read early, GPU": (HierarchicalByCollectives, "_wait_for", impatient, races(AER, True), MOVED),
    "step time, slow": (RunFolder, "append", halved, step_times, "1 ± 0.2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(name, "cpu", marks=[pytest.mark.slow] * ("slow" in name)) for name in FAULTS],
    indirect=["device"],
)
@pytest.mark.usefixtures("eager_kernel")
def test_a_fault_is_found(
    name: str, device: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, attribute, fault, check, message = FAULTS[name]
    if "GPU" in name:
        request.getfixturevalue("queued")
    if "early" in name or "written" in name:
        test_races.alone(CPU, "GPU" in name)  # has no messages
    monkeypatch.setattr(place, attribute, fault)
    with pytest.raises(AssertionError, match=message):
        check(tmp_path)


def wrong_mixing(rank: int, n: int, scenarios: Any) -> Any:
    """Rank 1's weights sum to more than 1."""
    merge = SendRecv.merge
    if rank == 1:
        SendRecv.merge = lambda exchange: (merge(exchange), exchange.chunk.mul_(1.05))
    return in_process(rank, n, scenarios)


@pytest.mark.slow
def test_wrong_mixing_is_found() -> None:
    tolerance = test_ranks.TOLERANCES[torch.float32, None]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_ranks.compare(CPU, 2, [Scenario(topology="one_peer_exponential")], tolerance, wrong_mixing)


def leaking_buffers(rank: int, n: int, device: Device) -> float:
    kept = []
    ReceiveBuffers.give_back = lambda _, vector: kept.append(vector)
    return test_memory.in_rank(rank, n, device, False)


@pytest.mark.slow
def test_memory_of_messages_that_stays_is_found() -> None:
    with pytest.raises(AssertionError, match="memory in models"):
        CPU.run(leaking_buffers, 4)


TESTS = """
import os, pytest
CHECK = 3, "no step waits for the GPU"
pytestmark = pytest.mark.gpu
def test_passes(figure): figure("none in 10 steps")
def test_fails(): assert 1 == 2, "a figure is wrong"
def test_dies(): os._exit(3)
"""


@pytest.mark.slow
def test_the_record_knows_what_failed_and_what_did_not_end(tmp_path: Path) -> None:
    file, table = tmp_path / "test_some.py", tmp_path / "gpu_check.csv"
    file.write_text(TESTS)
    known = os.environ | {"GPU_RECORD": str(tmp_path), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.gpu.conftest", "-c", os.devnull, str(file)]
    for chosen, result, figure in (
        ("passes or fails", "failed", "none in 10 steps; test_fails: AssertionError: a figure is wrong assert 1 == 2"),
        ("passes or dies", "failed", "none in 10 steps; test_dies did not end"),
    ):
        subprocess.run([*command, "-k", chosen], env=known, capture_output=True, check=False)
        (row,) = pd.read_csv(table).to_dict("records")
        assert (row["number"], row["result"], row["figure"]) == (3, result, figure)
    table.write_text(table.read_text().replace("\n3,", "\n10,"))
    subprocess.run([*command, "-k", "passes"], env=known, capture_output=True, check=False)
    rows = pd.read_csv(table)
    assert list(rows["number"]) == [3, 10]  # rows of other checks stay
    assert rows[["date", "commit", "hardware"]].notna().all(axis=None)
    assert (tmp_path / "gpu_check.md").read_text().startswith("# Checks on GPUs\n")
