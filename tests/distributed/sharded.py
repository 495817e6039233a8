"""Scenarios on workers whose ranks hold shards of the parameters (FSDP2), beside the same with whole replicas."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.scenarios import Scenario, Training, in_process, wrap


class Uneven(nn.Module):
    """With two ranks: a shard above 512 KiB, uneven ones, and one that is empty on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.head = nn.Linear(5, 601), nn.Linear(601, 451), nn.Linear(451, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.wide(self.first(x).tanh()).tanh())


class Statistics(nn.Module):
    """An MLP with BatchNorm, whose statistics every rank collects for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).tanh())


def mesh_of(n: int, ranks_per_worker: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (n // ranks_per_worker, ranks_per_worker), mesh_dim_names=("replicate", "shard"))


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply fully_shard over mesh["shard"] to each child that has parameters, then to the whole module."""
    for child in module.children():
        own = {id(p) for p in child.parameters()}
        if own and not own & {id(p) for other in module.children() if other is not child for p in other.parameters()}:
            fully_shard(child, mesh=mesh["shard"], **options)
    return fully_shard(module, mesh=mesh["shard"], **options)


def sharded(rank: int, n: int, scenario: Scenario, mesh: DeviceMesh | None = None, **options: Any) -> Training:
    """Begin the scenario on this rank with shards; workers begin with other parameters, the first one's must reach all.

    options: of fully_shard
    """
    mesh = mesh or mesh_of(n, scenario.ranks_per_worker, scenario.device)
    module = shard(scenario.build(seed=7 + rank // scenario.ranks_per_worker), mesh, **options)
    return Training(scenario, [wrap(module, scenario)], [[rank]])


def in_sharded_process(rank: int, n: int, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the results of the scenarios on this rank; to be called by `run_processes`."""
    results, meshes = [], {}
    for scenario in scenarios:
        k = scenario.ranks_per_worker
        mesh = meshes[k] = meshes.get(k) or mesh_of(n, k, scenario.device)
        training = sharded(rank, n, scenario, mesh).run(range(scenario.steps))
        results += training.results()
        training.model.close()
    return results


def in_both_ways(rank: int, n: int, scenarios: Sequence[Scenario]) -> list[tuple[dict, dict]]:
    """Return the results of the scenarios with shards, and with whole replicas."""
    return list(zip(in_sharded_process(rank, n, scenarios), in_process(rank, n, scenarios), strict=True))
