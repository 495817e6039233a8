"""Devices of local processes where GPUs are present, few or missing; no GPU is needed, as PyTorch is told of some."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.launch import rank as module
from common.launch.processes import launch
from common.parallel.devices import local_device
from common.parallel.process_groups import process_group
from tests.ports import free_port

CPU = torch.device("cpu")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process local rank `rank` of `processes` on a host with `gpus`."""

    def pretend(
        gpus: int, processes: int, rank: int = 0, world: int | None = None, first: int = 0
    ) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        numbers = {"RANK": first + rank, "LOCAL_RANK": rank, "WORLD_SIZE": world or processes}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in (numbers | {"LOCAL_WORLD_SIZE": processes} | address).items():
            monkeypatch.setenv(name, str(value))
        return chosen

    return pretend


def test_each_process_of_a_host_takes_its_own_gpu(host) -> None:
    chosen = host(gpus=4, processes=4, rank=2, world=8, first=4)  # the second of two such hosts
    assert local_device() == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)]


def test_too_few_gpus_mean_the_cpu_for_all_with_one_notice(host, capsys) -> None:
    for rank in range(4):
        chosen = host(gpus=3, processes=4, rank=rank)
        assert (local_device(), chosen) == (CPU, [])
    assert capsys.readouterr().err == "notice: 4 local processes for 3 visible GPUs; all of them compute on the CPU\n"
    host(gpus=0, processes=4)
    assert (local_device(), capsys.readouterr().err) == (CPU, "")


@pytest.mark.parametrize(("gpus", "said"), [(1, "2 local processes for 1 visible GPU;"), (0, "no GPU is available;")])
def test_gpus_that_were_asked_for_but_are_missing_are_refused_first(
    host, gpus: int, said: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(gpus=gpus, processes=2)
    monkeypatch.setattr(module, "open_process_group", lambda *_: pytest.fail("a process group was opened"))
    assert launch("cnn", ["training.device=cuda", f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: training.device=cuda: {said} expected")
    assert not (tmp_path / "run").exists()


def test_programs_around_runs_fall_back_too(host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.parallel.process_groups.check_launcher", lambda: None)  # the other two are not there
    host(gpus=1, processes=3, world=1)
    with process_group(20) as device:
        assert device == CPU
        assert torch.distributed.get_backend() == "gloo"
