"""Models whose parameters are spread over the ranks of a worker (FSDP2), and what of them goes into files."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.dtensors import is_dtensor, local, placed_as, whole
from common.torch_internals import tree_map_only


def shard(module: nn.Module, blocks: Iterable[nn.Module], ranks_per_worker: int, device: torch.device) -> None:
    """Spread the parameters over the ranks of each worker, in place: those of each block by itself, then the rest.

    In forward and backward FSDP gathers one block after another, and the rest as a whole. Collective.
    """
    # A second to import, which runs without shards need not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    workers = dist.get_world_size() // ranks_per_worker
    mesh = init_device_mesh(device.type, (workers, ranks_per_worker), mesh_dim_names=("replicate", "shard"))
    module.to(memory_format=torch.contiguous_format)  # FSDP takes no other
    for part in [*blocks, module]:
        fully_shard(part, mesh=mesh["shard"])


def without_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with this rank's parts of DTensors in their place: plain tensors, which any file can hold."""
    return tree_map_only(Tensor, local, state)


def module_state(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a sharded module from what `without_shards` left of it, on the same mesh."""
    own = module.state_dict()
    return {name: placed_as(own[name], tensor) if name in own else tensor for name, tensor in state.items()}


def optimizer_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer of a sharded module from what `without_shards` left of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def placed(index: int, value: Any) -> Any:
        # Counts of steps are no shards.
        is_shard = isinstance(value, Tensor) and value.shape == local(parameters[index]).shape
        return placed_as(parameters[index], value) if is_shard else value

    values = {i: {name: placed(i, value) for name, value in found.items()} for i, found in state["state"].items()}
    return {**state, "state": values}


def bare_state(module: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Return a copy of the bare module's state dict on the CPU, whose tensors are views of larger ones.

    keep: whether this rank wants it; else it returns nothing

    Where parameters are sharded, all ranks of the worker gather one tensor after the other. Collective then.
    """
    module = getattr(module, "_orig_mod", module)
    state = {}
    for name, tensor in module.state_dict().items():
        gathered = whole(tensor) if keep or is_dtensor(tensor) else tensor
        if keep:
            state[name] = gathered.detach().to("cpu", copy=True)
    return state
