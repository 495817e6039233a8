"""What a rank holds of its worker's replica: all of it, or with FSDP2 its shards (`common.parallel.sharded`)."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.flat import FlatVector, flatten
from common.parallel.collectives import broadcast_from_first
from common.parallel.process_groups import ProcessGroups


class Replica:
    """A whole replica on each rank of a worker.

    module: the bare module
    groups: the ranks of workers
    """

    averages_gradients = False  # inside the worker, in backward

    def __init__(self, module: nn.Module, groups: ProcessGroups) -> None:
        self._module, self._groups = module, groups

    @property
    def peers(self) -> tuple[int, dist.ProcessGroup | None]:
        """The number of the ranks that hold the same elements of the replicas, each worker's once or equally often, and
        their group."""
        return self._groups.world_size, self._groups.world

    def broadcast(self) -> None:
        """Give all workers the first one's parameters and rank 0's buffers. Collective."""
        broadcast_from_first([*self._module.parameters(), *self._module.buffers()], self._groups.world)

    def vectors(self) -> list[FlatVector]:
        """Put what this rank holds of all trainable parameters into flat vectors, one for each (dtype, device)."""
        return flatten(self._module)

    def placements(self) -> list[str]:
        """Return how each parameter is sharded, which has to be the same in all workers."""
        return []

    def reshard(self) -> None:
        """Drop what was gathered of sharded parameters: they are about to be written."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging them inside the worker."""
        return nullcontext()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError if an optimizer would not train what this rank holds."""
