"""Models whose parameters are sharded over the ranks of a worker (FSDP2), and their state in files."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.dtensors import is_dtensor, local, placed_as, whole
from common.torch_internals import tree_map_only


def shard(module: nn.Module, blocks: Iterable[nn.Module], ranks_per_worker: int, device: torch.device) -> None:
    """Shard the parameters over the ranks of each worker, in place: block by block, then the rest.

    In forward and backward FSDP gathers one block after another, and the rest as a whole. Collective.
    """
    # They take a second to import; runs without shards need not wait for that.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    workers = dist.get_world_size() // ranks_per_worker
    mesh = init_device_mesh(device.type, (workers, ranks_per_worker), mesh_dim_names=("replicate", "shard"))
    module.to(memory_format=torch.contiguous_format)  # FSDP accepts no other
    for part in [*blocks, module]:
        fully_shard(part, mesh=mesh["shard"])


def without_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with each DTensor replaced by this rank's part: a plain tensor, which any file can hold."""
    return tree_map_only(Tensor, local, state)


def module_state(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a sharded module from the result of `without_shards`, on the same mesh."""
    own = module.state_dict()
    return {name: placed_as(own[name], tensor) if name in own else tensor for name, tensor in state.items()}


def optimizer_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer of a sharded module from the result of `without_shards`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def placed(index: int, value: Any) -> Any:
        # Step counters are not shards.
        is_shard = isinstance(value, Tensor) and value.shape == local(parameters[index]).shape
        return placed_as(parameters[index], value) if is_shard else value

    values = {i: {name: placed(i, value) for name, value in found.items()} for i, found in state["state"].items()}
    return {**state, "state": values}


def bare_state(module: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Return a copy of the bare module's state dict on the CPU; the module's own tensors are views of larger ones.

    keep: whether this rank wants it; if not, an empty dict is returned

    If parameters are sharded, the ranks of the worker gather one tensor after another; the call is collective then.
    """
    module = getattr(module, "_orig_mod", module)
    state = {}
    for name, tensor in module.state_dict().items():
        gathered = whole(tensor) if keep or is_dtensor(tensor) else tensor
        if keep:
            state[name] = gathered.detach().to("cpu", copy=True)
    return state
