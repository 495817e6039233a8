"""An all-reduce in a group of workers that average uniformly."""

import torch
import torch.distributed as dist
from torch import Tensor

from common.optim.flat_state import Incoming
from common.parallel.collectives import sum_dtype
from common.parallel.gossip.exchange import Exchange, ReceiveBuffers
from common.parallel.gossip.routes import Route


class SubgroupAllReduce(Exchange):
    """A bucket that the members of one group average.

    The sum is taken in the chunk's dtype, in float32 for 16-bit chunks. No narrower `message_dtype` applies: the
    rounding of a sum would move the mean.
    """

    def __init__(self, chunk: Tensor, route: Route, buffers: ReceiveBuffers) -> None:
        super().__init__(chunk, route, buffers)
        self._sum = self.take(chunk.numel(), sum_dtype(chunk.dtype)).copy_(chunk)

    @property
    def message_bytes(self) -> int:
        """Bytes of the chunk in the dtype of the sum."""
        return self._sum.nbytes

    def receives(self) -> list[dist.P2POp]:
        """Return none: a collective receives by itself."""
        return []

    def start(self) -> list[dist.P2POp]:
        """Launch the all-reduce; `wait` reports it if that fails."""
        try:
            self.attach_works([dist.all_reduce(self._sum, group=self.route.allreduce, async_op=True)])
        except RuntimeError as error:
            self.attach_works([], error)
        return []

    def incoming(self) -> Incoming:
        """Return the sum, to be divided by the size of the group."""
        return Incoming(self._sum, self.weakened(0.0), self.strength / self.route.members)

    def merge(self) -> None:
        """Compute x_i <- sum / group size, in one pass."""
        if self.strength == 1:
            torch.mul(self._sum, 1 / self.route.members, out=self.chunk)
        else:
            self.chunk.mul_(self.weakened(0.0)).add_(self._sum, alpha=self.strength / self.route.members)
