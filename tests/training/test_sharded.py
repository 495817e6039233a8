"""Runs with parallel.shard=true: as with whole replicas on the same ranks. Resumed ones: see test_resume."""

from pathlib import Path

import pytest
import torch

from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.launch.processes import launch
from tests.training.runs import rows

RUN = [
    *("training.steps=10", "schedule.warmup=2", "evaluation.every=5", "logging.every=2", "logging.progress=false"),
    *("training.threads=1", "training.checkpoint_every=5", "model.width=8", "training.batch_size=64"),
    *("workers.count=2", "parallel.ranks_per_worker=2", "training.gradient_accumulation=2", "resume=true"),
]
METHODS = {
    "accumadamw": [
        *("optimizer=accumadamw", "optimizer.fused=true", "optimizer.weight_decay=0.1"),
        "task=tests.training.uncompiled",
    ],
    "adamw": ["optimizer=adamw", "training.clip=1.0", "parallel=gossip_diloco", "parallel.local_steps=4"],
}
FAR = ["evaluation.keep_average=true", "evaluation.recalibrate_batches=2"]


def run(folder: Path, *arguments: str) -> Path:
    assert launch("cnn", [*RUN, *arguments, f"run_dir={folder}"]) == 0
    return folder


def model(folder: Path, name: str = "last.pt") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)


@pytest.fixture(scope="module", params=["accumadamw", "adamw"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An uninterrupted sharded run, and its arguments."""
    arguments = [*METHODS[request.param], *FAR, "parallel.shard=true"]
    return run(tmp_path_factory.mktemp("shards") / "run", *arguments), arguments


@pytest.mark.slow
def test_equals_a_run_with_whole_replicas(shards: tuple[Path, list[str]], tmp_path: Path) -> None:
    shards, arguments = shards
    whole = run(tmp_path / "whole", *arguments[:-1])
    assert [row["step"] for row in rows(shards)] == [row["step"] for row in rows(whole)]
    for one, other in zip(rows(shards), rows(whole), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {"loss", "accuracy", "grad_norm", "consensus_distance"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
        assert one["bytes_sent"] == pytest.approx(other["bytes_sent"] / 2, rel=0.15)  # small parameters are padded
    for name in ("last.pt", "best.pt"):
        assert model(shards, name).keys() == model(whole, name).keys()
        for key, tensor in model(whole, name).items():
            torch.testing.assert_close(model(shards, name)[key], tensor, rtol=1e-3, atol=1e-4)


STILL = ["training.steps=2", "schedule.warmup=0", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
MESHES = [  # of runs that go on one from another's mean model
    ["workers=simulated", "workers.count=2", "parallel.ranks_per_worker=1"],
    ["workers.count=1", "parallel.ranks_per_worker=2", "parallel.shard=true"],
    ["workers.count=2", "parallel.ranks_per_worker=2", "parallel.shard=true"],
    ["workers=simulated", "workers.count=4", "parallel.ranks_per_worker=1"],
]


def go_on(folder: Path, meshes: list[list[str]]) -> None:
    """Train on the first mesh; then expect that on each other one a run begins with the model of the one before."""
    former = run(folder / "0", *meshes[0], "training.steps=4")
    for number, mesh in enumerate(meshes[1:], start=1):
        begun_from = former / "checkpoints" / "last.pt"
        former = run(folder / str(number), *mesh, *STILL, f"init_from={begun_from}")
        for name, tensor in torch.load(begun_from, weights_only=True).items():
            if "running" not in name and "tracked" not in name:  # BatchNorm's statistics go on
                assert torch.equal(model(former)[name], tensor), (mesh, name)


@pytest.mark.slow
def test_a_model_goes_to_other_meshes_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_on(tmp_path, MESHES)
    begun_from = tmp_path / "2" / "checkpoints" / "last.pt"
    assert f"started from the model {begun_from}; optimizer, schedule and data start afresh" in capsys.readouterr().err
    assert launch("cnn", [*RUN, *MESHES[2], *STILL, f"run_dir={tmp_path}/1"]) == 2
    error = capsys.readouterr().err
    assert "workers.count: 1 there, 2 now" in error
    assert f"init_from={tmp_path}/1/checkpoints/last.pt goes on from its mean model" in error


REFUSED = {
    "parallel.ranks_per_worker=1": r"ranks_per_worker=1 with shard=true: expected 2 or more",
    "parallel.find_unused_parameters=true": "find_unused_parameters=true with shard=true: expected false",
    "workers=simulated": "parallel.shard=true with workers=simulated: expected parallel.shard=false",
    "optimizer=muon": "parallel.shard=true with optimizer=muon: expected",
    "training.compile=true": "parallel.shard=true with training.compile=true: expected",
    "evaluation.local_models=true": "parallel.shard=true with evaluation.local_models=true: expected",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_needs_whole_replicas_is_refused(override: str) -> None:
    arguments = ["parallel.shard=true", "workers.count=2", "parallel.ranks_per_worker=2", override]
    with pytest.raises(ConfigError, match=REFUSED[override]):
        compose_config("cnn", arguments)
