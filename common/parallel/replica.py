"""A rank's part of its worker's replica: all of it, or its shards, as FSDP2 (`fully_shard`) leaves them.

FSDP gathers and frees whole parameters layer by layer and averages gradients inside the worker. Between workers gossip
mixes shards: rank (worker r, shard s) exchanges its shard with (r', s), 1 / ranks_per_worker of the bytes.

FSDP pads shards to equal sizes on all ranks and keeps each in a private buffer; the local part of the DTensor in
`module.parameters()` is a view of it. A `ShardVector` moves these buffers into one flat vector.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from common.dtensors import is_dtensor, local, placement
from common.flat import FlatVector, Slot, by_kind, flatten, layout
from common.optim import MuonAdamW
from common.parallel.collectives import broadcast_from_first
from common.parallel.process_groups import ProcessGroups
from common.torch_internals import fsdp_parameters, gathered_parameter, move_shard, shard_memory, version_of


class Replica:
    """A whole replica on each rank of a worker.

    module: the bare module
    groups: the process groups of workers
    """

    averages_gradients = False  # whether it averages them inside the worker, in backward

    def __init__(self, module: nn.Module, groups: ProcessGroups) -> None:
        self._module, self._groups = module, groups

    @property
    def peers(self) -> tuple[int, dist.ProcessGroup | None]:
        """The number and the group of the ranks that hold the same elements of the replicas; each worker occurs equally
        often."""
        return self._groups.world_size, self._groups.world

    def broadcast(self) -> None:
        """Give all ranks rank 0's parameters and buffers. Collective."""
        broadcast_from_first([*self._module.parameters(), *self._module.buffers()], self._groups.world)

    def vectors(self) -> list[FlatVector]:
        """Put this rank's part of all trainable parameters into flat vectors, one for each (dtype, device)."""
        return flatten(self._module)

    def placements(self) -> list[str]:
        """Return how each parameter is sharded, which has to be the same in all workers."""
        return []

    def reshard(self) -> None:
        """Drop gathered copies of sharded parameters: the shards are about to be written."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging them inside the worker."""
        return nullcontext()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError if an optimizer would not train what this rank holds."""


class ShardVector(FlatVector):
    """This rank's shards of the parameters of one dtype and device in one vector `data` [numel].

    named_parameters: sharded parameters (DTensors), at least one
    managed:          FSDP's record of each of them

    A slot has the size of the shard and room for FSDP's padding, which stays 0.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], managed: dict[nn.Parameter, Any]) -> None:
        self._managed = managed
        super().__init__(named_parameters)

    def _layout(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> tuple[list[Slot], int]:
        sizes = [self._padded_size(parameter) for _, parameter in named_parameters]
        return layout([(name, local(parameter)) for name, parameter in named_parameters], sizes)

    def _padded_size(self, parameter: nn.Parameter) -> int:
        return math.prod(self._managed[parameter].padded_sharded_param_size)

    def _values(self, parameter: nn.Parameter) -> Tensor:
        return local(parameter)

    def _attach(self, parameter: nn.Parameter, slot: Slot, view: Tensor) -> None:
        move_shard(self._managed[parameter], self.data[slot.offset : slot.offset + self._padded_size(parameter)])

    def _lies_at(self, parameter: nn.Parameter, address: int) -> bool:
        managed, part = self._managed[parameter], local(parameter)
        moved = managed.sharded_param is not parameter or (part.numel() and part.data_ptr() != address)
        return not moved and (shard_memory(managed).data_ptr() == address or not self._padded_size(parameter))

    def _writes(self, parameter: nn.Parameter) -> Hashable:
        return version_of(parameter), version_of(local(parameter))


class ShardedReplica(Replica):
    """This rank's shards of its worker's replica, and FSDP's records of them.

    Raises ValueError naming the parameter where gossip cannot mix the shards: a mesh that is not the worker's ranks or
    has further dimensions, CPU offload, or trainable parameters that are not sharded.
    """

    averages_gradients = True

    def __init__(self, module: nn.Module, groups: ProcessGroups) -> None:
        super().__init__(module, groups)
        self._parts = [part for part in module.modules() if is_fsdp(part)]
        self.reshard()
        self._managed = {managed.sharded_param: managed for managed in fsdp_parameters(self._parts)}
        self._named = list(module.named_parameters())
        for name, parameter in self._named:
            check_parameter(name, parameter, self._managed.get(parameter))
        check_ranks({name: self._managed[p] for name, p in self._named if p in self._managed}, groups)

    @property
    def peers(self) -> tuple[int, dist.ProcessGroup | None]:
        """The number of workers, and the group of the ranks that hold each worker's shard of these elements."""
        return self._groups.workers, self._groups.between_workers

    def broadcast(self) -> None:
        """Give all workers the first worker's shards, and rank 0's buffers and unsharded parameters. Collective."""
        whole = [parameter for _, parameter in self._named if parameter not in self._managed]
        broadcast_from_first([local(parameter) for parameter in self._managed], self._groups.between_workers)
        broadcast_from_first([*whole, *self._module.buffers()], self._groups.world)

    def vectors(self) -> list[FlatVector]:
        """Put the shards of all trainable parameters into flat vectors, one for each (dtype, device)."""
        trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        return [ShardVector(group, self._managed) for group in by_kind(trained)]

    def placements(self) -> list[str]:
        """Return along which dimension each parameter is sharded."""
        return [f"{name} {placement(p)[1]}" for name, p in self._named if p in self._managed]

    def reshard(self) -> None:
        """Free gathered parameters: shards are about to be written.

        After a forward without a backward, as in evaluation, FSDP keeps the root's and would go on using them.
        """
        for part in self._parts:
            part.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on each rank; the next backward outside reduces them to shards."""
        for part in self._parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in self._parts:
                part.set_requires_gradient_sync(True, recurse=False)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError if it holds gathered parameters, which get no gradients in backward, or needs whole ones."""
        if isinstance(optimizer, Muon | MuonAdamW):
            raise ValueError(
                "attach: Muon with a sharded module: it orthogonalises whole matrices; expected an optimizer that "
                "updates each element by itself, such as AdamW"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gathered = {id(gathered_parameter(managed)): p for p, managed in self._managed.items()}
        names = {parameter: name for name, parameter in self._named}
        for parameter in parameters:
            if id(parameter) in gathered:
                name = names[gathered[id(parameter)]]
                raise ValueError(
                    f"attach: the optimizer holds the gathered parameter '{name}', not its shard: after a forward "
                    "without a backward call .reshard() on the module before building an optimizer"
                )


def replica_of(module: nn.Module, groups: ProcessGroups, find_unused_parameters: bool) -> Replica:
    """Return this rank's part of the bare module.

    Raises ValueError for sharded modules that cannot be mixed (see `ShardedReplica`) or `find_unused_parameters`.
    """
    if not is_sharded(module):
        return Replica(module, groups)
    if find_unused_parameters:
        raise ValueError(
            "find_unused_parameters=True with a sharded module: expected False; FSDP averages gradients, its "
            "set_reduce_scatter_unused_params(True) gives unused parameters gradients of zero"
        )
    return ShardedReplica(module, groups)


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameter of the module is a DTensor, or was before FSDP gathered it."""
    return any(map(is_fsdp, module.modules())) or any(map(is_dtensor, module.parameters()))


def is_fsdp(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to the module itself."""
    return hasattr(module, "set_requires_gradient_sync")


def check_parameter(name: str, parameter: nn.Parameter, managed: Any) -> None:
    """Raise ValueError if gossip cannot mix a parameter; managed: FSDP's record of it, None if it has none."""
    if managed is None and is_dtensor(parameter):
        wrong, expected = "is a DTensor that FSDP does not manage (tensor parallelism?)", "fully_shard only"
    elif managed is None and parameter.requires_grad:
        wrong, expected = "is not sharded, others are", "all trainable ones sharded: apply fully_shard to the root too"
    elif managed is None:
        return
    elif managed.mesh_info.replicate_mesh_dim is not None:
        wrong = f"is replicated by FSDP on mesh {managed.mesh_info.mesh}"
        expected = "a mesh with the shard dimension alone, such as mesh['shard']: gossip replaces the other one"
    elif managed.is_dtensor:
        wrong, expected = "is sharded by tensor parallelism too", "fully_shard only"
    elif managed.offload_to_cpu:
        wrong, expected = "is offloaded to the CPU", "fully_shard without an offload_policy"
    elif local(parameter).is_meta or type(local(parameter)) is not Tensor:
        wrong = f"has a shard of type {type(local(parameter)).__name__} on {parameter.device}"
        expected = "plain tensors in memory: initialise parameters before wrapping"
    else:
        return
    raise ValueError(f"parameter '{name}' {wrong}; expected {expected}")


def check_ranks(managed: dict[str, Any], groups: ProcessGroups) -> None:
    """Raise ValueError unless each parameter is sharded over the ranks of this worker, in their order."""
    own = list(groups.ranks_of_worker)
    for name, record in managed.items():
        found = dist.get_process_group_ranks(record.mesh_info.shard_process_group)
        if found != own:
            raise ValueError(
                f"parameter '{name}' is sharded over ranks {found}, but with ranks_per_worker={len(own)} worker "
                f"{groups.worker} is ranks {own}; expected mesh['shard'] of mesh = init_device_mesh(device, (workers, "
                "ranks_per_worker), mesh_dim_names=('replicate', 'shard'))"
            )
