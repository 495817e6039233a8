"""PyTorch beyond its public interface is what `common.torch_internals` says, and no other module relies on it."""

import ast
import tomllib
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from common import torch_internals as internals
from tests.distributed.processes import run_processes

ROOT = Path(__file__).resolve().parents[1]
STANDARD = {"_asdict", "_exit", "_replace"}
OLD = {"_parameters"}  # of torch.nn.Module, since its beginning
ADAPTERS = {  # to private names of other packages
    "common/launch/cli.py",  # hydra
    "scripts/benchmarks/engines.py",
    "transformer/fairseq_compat.py",
}
ROOMS = ("cnn", "common", "gpt2", "scripts", "slurm", "transformer")


def test_the_installed_version_is_supported() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ours,) = [requirement for requirement in map(Requirement, wanted) if requirement.name == "torch"]
    assert ours.specifier.contains(torch.__version__, prereleases=True)


def private(file: Path) -> set[str]:
    """Return the private names that a file takes from elsewhere: that it does not define, nor sets in `self`."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    foreign = {node.attr for node in attributes if getattr(node.value, "id", None) != "self"}
    own = {node.attr for node in attributes if getattr(node.value, "id", None) == "self"}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    foreign = foreign - own | {part for module in modules for part in module.split(".")}
    return {name for name in foreign if name[0] == "_" and not name.startswith(("__", "_foreach_"))}


def test_no_other_module_relies_on_private_names() -> None:
    files = {str(file.relative_to(ROOT)): file for room in ROOMS for file in ROOT.glob(f"{room}/**/*.py")}
    found = {name: private(file) - STANDARD - OLD for name, file in files.items() if name not in ADAPTERS}
    assert {"_get_backend", "_local_tensor", "_pytree", "_version"} <= found.pop("common/torch_internals.py")
    assert {name: names for name, names in found.items() if names} == {}


def test_tensors_and_the_profiler() -> None:
    tensor = torch.zeros(3)
    before = internals.version_of(tensor)
    assert internals.version_of(tensor.add_(1)) > before
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    assert internals.sparse_values(sparse).tolist() == [2, 3]
    assert (internals.is_dtensor(tensor), internals.local(tensor)) == (False, tensor)
    assert not internals.is_profiling()
    with profile():
        assert internals.is_profiling()
    assert isinstance(nn.BatchNorm2d(1), internals.AnyBatchNorm)
    assert all(isinstance(norm(1), internals.NormWithStatistics) for norm in (nn.BatchNorm1d, nn.InstanceNorm3d))


def test_launchers_wait_after_signals_where_they_can() -> None:
    assert internals.shutdown_timeout(7) == ({} if torch.__version__.startswith("2.11.") else {"shutdown_timeout": 7})


def opened(ranks: int = 1) -> str:
    """Open the default group and another, and close both; return the other's name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=ranks, timeout=timedelta(seconds=0.1))
    name = dist.new_group().group_name
    dist.destroy_process_group()
    return name


def test_process_groups_have_their_first_names_again_after_one_that_failed() -> None:
    internals.restart_group_names()  # other tests open groups, too
    first = opened()
    with pytest.raises(dist.DistStoreError):
        opened(ranks=2)
    internals.restart_group_names()
    assert opened() == first


def groups(rank: int, n: int) -> None:
    before = len(internals.open_groups())
    group = dist.new_group()
    assert (len(internals.open_groups()), group in internals.open_groups()) == (before + 1, True)
    backend, tensor = internals.backend_of(group, torch.device("cpu")), torch.full((1,), float(rank))
    (backend.send if rank == 0 else backend.recv)([tensor], 1 - rank, 7).wait()
    assert tensor.item() == 0
    own, full = torch.zeros(2), (rank + 1) * torch.arange(4.0)
    internals.reduce_scatter_single(own, full)
    internals.all_gather_single(full, own)
    assert full.tolist() == [0, 3, 6, 9]
    dist.destroy_process_group(group)
    assert (len(internals.open_groups()), group in internals.open_groups()) == (before, False)


def buffers(rank: int, n: int) -> None:
    module = nn.BatchNorm1d(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = DistributedDataParallel(module, **internals.DDP_OWN_BUFFERS)
    for _ in range(2):
        wrapped(torch.full((4, 2), float(rank))).sum().backward()
    assert module.running_mean.tolist() == pytest.approx([0.19 * rank] * 2)


@pytest.mark.parametrize("check", [groups, buffers])
def test_process_groups_and_ddp(check: Callable) -> None:
    run_processes(check, 2)
