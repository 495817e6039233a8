"""Sharded modules that gossip cannot mix are refused by name, as are optimizers that would not train them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from common.flat import flatten
from common.optim import AccumAdamW
from common.parallel import AllReduceDataParallel, DecentralizedDataParallel
from tests.distributed.models import mlp
from tests.distributed.processes import run_processes
from tests.distributed.sharded import mesh_of, shard
from tests.naming import case


def hybrid(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(mlp(), mesh=mesh)


def replicated(mesh: DeviceMesh) -> nn.Module:
    return replicate(mlp(), mesh=mesh["replicate"])


def mixed_meshes(mesh: DeviceMesh) -> nn.Module:
    module = mlp()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (4,)))
    return fully_shard(module, mesh=mesh["shard"])


def over_the_wrong_dimension(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(mlp(), mesh=mesh["replicate"])


def over_all_ranks(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(mlp(), mesh=init_device_mesh("cpu", (4,)))


def without_the_root(mesh: DeviceMesh) -> nn.Module:
    module = mlp()
    fully_shard(module[0], mesh=mesh["shard"])
    return module


def offloaded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(mlp(), mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(mlp(), mesh["shard"], {"0": ColwiseParallel()})


def tensor_parallel_too(mesh: DeviceMesh) -> nn.Module:
    module = parallelize_module(mlp(), mesh["shard"], {name: ColwiseParallel() for name in ("0", "2", "4")})
    return fully_shard(module, mesh=mesh["replicate"])


def uninitialised(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        module = mlp()
    return fully_shard(module, mesh=mesh["shard"])


REFUSED: list[tuple[Callable[[DeviceMesh], nn.Module], dict[str, Any], str]] = [
    (hybrid, {}, r"'0\.weight' is replicated by FSDP.*expected a mesh with the shard dimension alone"),
    (replicated, {}, r"'0\.weight' is replicated by FSDP.*expected a mesh with the shard dimension alone"),
    (mixed_meshes, {}, r"'0\.weight' is sharded over ranks \[0, 1, 2, 3\], but with ranks_per_worker=2 worker 0"),
    (over_the_wrong_dimension, {}, r"over ranks \[0, 2\], but .* worker 0 is ranks \[0, 1\]; expected mesh\['shard'\]"),
    (over_all_ranks, {}, r"over ranks \[0, 1, 2, 3\], but with ranks_per_worker=2 worker 0 is ranks \[0, 1\]"),
    (without_the_root, {}, r"'2\.weight' is not sharded, others are; expected .*apply fully_shard to the root too"),
    (offloaded, {}, r"'0\.weight' is offloaded to the CPU; expected fully_shard without an offload_policy"),
    (tensor_parallel, {}, r"'0\.weight' is a DTensor that FSDP does not manage"),
    (tensor_parallel_too, {}, r"'0\.weight' is sharded by tensor parallelism too; expected fully_shard only"),
    (uninitialised, {}, r"'0\.weight' has a shard .* on meta; expected .*initialise parameters before wrapping"),
    (lambda mesh: shard(mlp(), mesh), {"ranks_per_worker": 1}, r"with ranks_per_worker=1 worker 0 is ranks \[0\]"),
    (lambda mesh: shard(mlp(), mesh), {"find_unused_parameters": True}, "expected False; FSDP averages gradients"),
]


def refused(rank: int, n: int) -> list[str]:
    """Return the message for each module."""
    mesh, messages = mesh_of(n, 2), []
    for build, options, _ in REFUSED:
        module = build(mesh)
        with case(build.__name__), pytest.raises(ValueError, match=r"expected") as error:
            DecentralizedDataParallel(module, "one_peer_exponential", **{"ranks_per_worker": 2} | options)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_mixed_is_refused_by_name() -> None:
    messages = run_processes(refused, 4)[0]
    for message, (build, _, pattern) in zip(messages, REFUSED, strict=True):
        with case(build.__name__):
            assert re.search(pattern, message), message


def refused_elsewhere(rank: int, n: int) -> None:
    mesh = mesh_of(n, 2)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a DTensor; expected .*DecentralizedDataParallel"):
        AllReduceDataParallel(shard(mlp(), mesh))
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a DTensor; expected .*DecentralizedDataParallel"):
        flatten(shard(mlp(), mesh))
    module = fully_shard(mlp(), mesh=mesh["shard"])
    model = DecentralizedDataParallel(module, "complete", ranks_per_worker=2)
    with torch.no_grad():
        module.eval()(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"gathered parameter '0\.weight', not its shard.*\.reshard\(\)"):
        model.attach(AccumAdamW(module.parameters()))
    with pytest.raises(ValueError, match=r"Muon with a sharded module.*expected .* such as AdamW"):
        model.attach(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]))
    model.attach(AccumAdamW(model.parameters()))


def test_what_would_not_train_shards_is_refused() -> None:
    run_processes(refused_elsewhere, 2)


def different(rank: int, n: int) -> None:
    """Workers whose parameters are sharded along different dimensions."""
    mesh = mesh_of(n, 2)
    dim = rank // 2
    module = nn.Linear(4, 4)
    fully_shard(
        module,
        mesh=mesh["shard"],
        shard_placement_fn=lambda p: torch.distributed.tensor.Shard(dim if p.dim() > 1 else 0),
    )
    with pytest.raises(RuntimeError, match=r"ranks \[2, 3\] disagree with rank 0 about sharding"):
        DecentralizedDataParallel(module, "complete", ranks_per_worker=2)


@pytest.mark.slow
def test_workers_that_shard_differently_are_refused() -> None:
    run_processes(different, 4)
