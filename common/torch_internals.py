"""The parts of PyTorch used here that are not public, or not the same in all versions from 2.11 to 2.15.

`tests/test_torch_internals.py` checks these names against the installed version, and that all other modules use only
public ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

AnyBatchNorm = nn.modules.batchnorm._BatchNorm
NormWithStatistics = nn.modules.batchnorm._NormBase  # BatchNorm, SyncBatchNorm, InstanceNorm, lazy ones too
tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only
disable_dynamo = torch._disable_dynamo  # like torch.compiler.disable, but imports the compiler only when called

# The option that makes DDP leave buffers to each rank: renamed in 2.13, where the old name gives a warning.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
DDP_OWN_BUFFERS = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

# Collectives on one tensor: renamed in 2.13, where the old names are deprecated.
if hasattr(dist, "all_gather_single"):
    all_gather_single, reduce_scatter_single = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather_single, reduce_scatter_single = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of in-place writes to a tensor."""
    return tensor._version


def is_profiling() -> bool:
    """Return whether a profiler is recording this program."""
    return torch.autograd.profiler._is_profiler_enabled


# -- launchers and process groups


def shutdown_timeout(seconds: int) -> dict[str, int]:
    """Return the launcher's option for how long it waits for ranks after a signal; 2.11 has none and waits for 30 s."""
    from torch.distributed.launcher.api import LaunchConfig  # which most processes do not need

    return {"shutdown_timeout": seconds} if "shutdown_timeout" in signature(LaunchConfig).parameters else {}


def open_groups() -> Collection[dist.ProcessGroup]:
    """Return the process groups of this process that have not been destroyed, not a copy."""
    return dist.distributed_c10d._world.pg_map


def restart_group_names() -> None:
    """Restart at 0 the numbers by which process groups are named."""
    dist.distributed_c10d._world.group_count = 0


def backend_of(group: dist.ProcessGroup, device: torch.device) -> dist.Backend:
    """Return the backend that carries the group's messages between such devices. Raises RuntimeError without one."""
    return group._get_backend(device)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set how long a group waits for its peers from now on."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout, group)  # public from 2.14


def can_reconfigure(device: torch.device) -> bool:
    """Return whether this version can change the ranks of groups: gloo's from 2.14 on, NCCL's from 2.15 on."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= ((2, 14) if device.type == "cpu" else (2, 15))


def reconfigurable_group(backend: str, store: dist.Store, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a new group without ranks; `reconfigure` gives it some."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place, own = (size, rank, list(range(size)), backend), {"timeout": timeout, "enable_reconfigure": True}
    group, _ = dist.distributed_c10d._new_process_group_helper(*place, store, name, **own)
    dist.distributed_c10d._world.pg_group_ranks[group] = {}
    return group


def reconfigure_handle(group: dist.ProcessGroup) -> bytes:
    """Return what other ranks need to reach this one in `reconfigure`."""
    return dist._get_reconfigure_handle(group)


def reconfigure(
    group: dist.ProcessGroup, number: int, ranks: Sequence[int], handles: Sequence[str], timeout: timedelta
) -> None:
    """Give a group these ranks, in this order, by their handles; number: different in every attempt. Collective.

    Raises RuntimeError if a rank does not join in time; by then some ranks may have been reconfigured, and others not.
    """
    dist._reconfigure(number, handles, group, timeout).wait()
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}


# -- sparse tensors, DTensors and FSDP2


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the memory of a sparse tensor's values, coalesced or not."""
    return tensor._values()


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, not a view of it; return any other tensor unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def fsdp_parameters(parts: Sequence[nn.Module]) -> Iterator[FSDPParam]:
    """Yield FSDP's record of each parameter of modules to which `fully_shard` was applied."""
    states = {id(state): state for state in (part._get_fsdp_state() for part in parts)}  # several modules may share one
    for state in states.values():
        if hasattr(state, "_fsdp_param_groups"):  # from 2.12: one for each mesh
            groups = state._fsdp_param_groups
        else:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            yield from group.fsdp_params


def shard_memory(managed: FSDPParam) -> Tensor:
    """Return the buffer [numel of the padded shard] from which FSDP gathers the parameter."""
    return managed._sharded_param_data


def move_shard(managed: FSDPParam, memory: Tensor) -> None:
    """Have FSDP and the DTensor keep the shard in `memory` [numel of the padded shard], which holds its values."""
    parameter, dim = managed.sharded_param, managed.fsdp_placement.dim
    memory = torch.from_dlpack(memory)  # as in common.dtensors.placed_as
    padded = memory.view(managed.padded_sharded_param_size)
    managed._sharded_param_data = memory
    # `.data` gives the local part its own version counter, which reveals writes that bypass the DTensor.
    parameter._local_tensor = padded.narrow(dim, 0, managed.sharded_size[dim]).data


def gathered_parameter(managed: FSDPParam) -> nn.Parameter | None:
    """Return the whole parameter that FSDP gathered last, perhaps without memory by now; None before the first time."""
    return getattr(managed, "_unsharded_param", None)
