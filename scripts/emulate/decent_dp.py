"""decent-dp in the training loop, so that its runs can be compared: `scripts.emulate engine=decent_dp run="-m ..."`.

The configuration is that of our gossip, `parallel=decentralized`. decent-dp clips, steps its optimizers (one for each
bucket) and sends in the hooks of backward; the loop's `optimizer.step()` then only counts the update. Each bucket is
clipped by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.config import Config, ConfigError
from common.parallel.averaging import average_buffers_, averageable_buffers, consensus_distance
from common.parallel.data_parallel import DataParallel

# What decent-dp calls our topologies.
TOPOLOGIES = {
    "complete": "complete",
    "one_peer_ring": "ring",
    "hypercube": "one-peer-exp",
    "aer": "alternating-exp-ring",
}
BUCKET_MB = 25  # decent-dp's default


class DecentDP(DataParallel):
    """A replica that decent-dp trains.

    topology: as decent-dp names it
    clip:     maximum norm of a bucket's gradient; None: no clipping

    `counters.bytes_sent` assumes rings, as in AllReduceDataParallel. Runs cannot be resumed.
    """

    def __init__(self, module: nn.Module, topology: str, clip: float | None, bucket_mb: float = BUCKET_MB) -> None:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        super().__init__(module, dist.get_rank(), dist.get_world_size())
        self.__dict__["_ddp"] = DecentralizedDataParallel(
            module, self._optimizer_of, topology=topology, grad_clip_norm=clip or 0.0, bucket_size_in_mb=bucket_mb
        )
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Train with optimizers like this one; return one that commits updates and carries the learning rate."""
        self._kind = type(optimizer)
        return super().attach(Committing(optimizer.param_groups, optimizer.defaults))

    def _optimizer_of(self, named: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """Return the optimizer of a bucket's parameters."""
        own = {id(parameter) for _, parameter in named}
        whole = self._optimizers[0].param_groups
        groups = [group | {"params": [p for p in group["params"] if id(p) in own]} for group in whole]
        return self._kind([group for group in groups if group["params"]], whole[0]["lr"])

    def _before_forward(self) -> None:
        rate = self._optimizers[0].param_groups[0]["lr"]
        for optimizer in self._ddp._optims:  # empty before the second forward, which makes them
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _after_update(self) -> None:
        if self.clock > 0:  # from the second backward on it sends
            k = len(self._ddp._topo.get_edge(self._ddp._step + 1).ranks)
            self.counters.bytes_sent += 2 * (k - 1) / k * sum(p.numel() * p.element_size() for p in self._trained)
            self.counters.rounds += 1

    def _drain(self) -> None:
        """Wait for what is in flight; it is of copies, and still merged later."""
        for work in self._ddp._comm_ops:
            if work is not None:
                work.wait()

    def load_clock(self, clock: int) -> None:
        """Refuse to resume."""
        raise RuntimeError("decent-dp cannot resume a run: remove run_dir, and train from the beginning")

    def average_(self) -> None:
        """Refuse to replace parameters: what is in flight would be merged into them."""
        raise RuntimeError("decent-dp: expected averaged(), which restores the parameters")

    def consensus_distance(self) -> float:
        """Return the distance, see `DataParallel`. Collective."""
        return consensus_distance([p.detach().reshape(-1) for p in self._trained], self.world_size, None)

    def _mean_state(self) -> list[Tensor]:
        return [*(p.detach() for p in self._trained), *averageable_buffers(self.module)]

    def _write_mean(self) -> None:
        average_buffers_(self._mean_state(), self.world_size, None)


class Committing(Optimizer):
    """Commits the update that decent-dp has made in backward."""

    def step(self, closure: Any = None) -> None:
        """Update nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep gradients: decent-dp applies those of the first backward in the second forward, and clears them."""


def parallelize(module: nn.Module, config: Config) -> list[DataParallel]:
    """Return decent-dp's replica, as common.training.worker.parallelize does ours.

    Raises ConfigError for what decent-dp cannot do.
    """
    parallel, training = config.parallel, config.training
    if parallel.method != "decentralized":
        raise ConfigError(f"parallel={parallel.method} with engine=decent_dp: expected decentralized")
    given = {
        "parallel.order": (parallel.order, "awc"),
        "parallel.ranks_per_worker": (parallel.ranks_per_worker, 1),
        "parallel.local_steps": (parallel.local_steps, 1),
        "parallel.message_dtype": (parallel.message_dtype, None),
        "parallel.push_sum": (parallel.push_sum, False),
        "workers": (config.workers.kind, "processes"),
        "training.gradient_accumulation": (training.gradient_accumulation, 1),
        "training.precision": (training.precision, "fp32"),
    }
    for key, (value, expected) in given.items():
        if value != expected:
            raise ConfigError(f"{key}={value} with engine=decent_dp: expected {expected}")
    if config.topology.name not in TOPOLOGIES:
        raise ConfigError(f"topology={config.topology.name} with engine=decent_dp: expected {', '.join(TOPOLOGIES)}")
    return [DecentDP(module, TOPOLOGIES[config.topology.name], training.clip)]
