"""What a run computes on and how: GPUs, few or missing (PyTorch is told of some), precision, determinism."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cnn.task import TASK
from common.config.config import Config
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.parallel.process_groups import local_device, process_group
from common.training import device as module
from common.training.evaluation import Evaluator
from common.training.worker import build_workers
from tests.ports import free_port

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = ["workers=simulated", "workers.count=2", "model.width=4", "training.threads=1", "logging.progress=false"]
SHORT = ["training.steps=2", "schedule.warmup=0", "evaluation.every=1"]


@pytest.fixture(autouse=True)
def settings_restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32, cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)


def settings() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": cudnn.conv.fp32_precision == "tf32",
        "seen by the compiler": (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32),
        "benchmark": cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def config_of(*overrides: str) -> Config:
    return compose_config("cnn", [*SMALL, *overrides])


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_settings_of_a_gpu(tf32: bool, deterministic: bool) -> None:
    training = config_of(f"training.tf32={tf32}", f"training.deterministic={deterministic}").training
    module.require_determinism(training.deterministic)
    for fixed_shapes in (True, False):
        module.configure_gpu(training, fixed_shapes)
        assert settings() == {
            "products": "high" if tf32 else "highest",
            "convolutions": tf32,
            "seen by the compiler": (tf32, tf32),
            "benchmark": fixed_shapes and not deterministic,
            "deterministic": deterministic,
            "cublas": ":4096:8" if deterministic else None,
        }


def test_a_run_is_configured_before_it_looks_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pick(config: Config) -> torch.device:
        calls.append(settings()["cublas"])
        return GPU

    def configure(training: object, fixed_shapes: bool) -> None:
        calls.append(fixed_shapes)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(module, "pick_device", pick)
    monkeypatch.setattr(module, "configure_gpu", configure)
    assert launch("cnn", [*SMALL, "training.deterministic=true", f"run_dir={tmp_path}/run"]) == 1
    assert calls == [":4096:8", True]


def test_a_deterministic_run_trains_as_any_on_a_cpu(tmp_path: Path) -> None:
    for deterministic in (True, False):
        run = [*SMALL, *SHORT, f"training.deterministic={deterministic}", f"run_dir={tmp_path}/{deterministic}"]
        assert launch("cnn", run) == 0
        assert settings()["deterministic"] == deterministic
    models = [torch.load(tmp_path / str(kind) / "checkpoints" / "last.pt") for kind in (True, False)]
    assert all(torch.equal(models[0][name], tensor) for name, tensor in models[1].items())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_evaluation_computes_in_the_precision_of_training(precision: str, dtype: torch.dtype) -> None:
    config = config_of(f"training.precision={precision}", "evaluation.recalibrate_batches=1")
    task, seen = TASK(config), []
    workers = build_workers(task, config, CPU, 0, 10, 10)
    for worker in workers:
        worker.model.module.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    metrics: list[dict[str, float]] = []
    Evaluator(task, workers, config, CPU, 0).evaluate(lambda found, _: metrics.append(found))
    assert len(seen) >= 3  # two batches that recalibrate, one that is evaluated
    assert set(seen) == {dtype}
    assert metrics[0]["loss"] == pytest.approx(2.3, abs=0.5)


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
    monkeypatch.setattr("common.launch.rank.open_process_group", lambda *_: pytest.fail("a process group was opened"))
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
