"""Simulated workers with the contract of the real ones (`common.parallel.DataParallel`).

The workers' parameters are the rows of one matrix X [N, P] for each dtype. In every step all workers first run
forward and backward, then all step: the first `optimizer.step()` of an update, or with order "atc" the last, does
what the messages would have done, X <- W(t) X, for all workers at once.
"""

import copy
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from common.arguments import Bounds, check_arguments
from common.optim import AccumAdam, AccumAdamW
from common.options import GossipOptions
from common.parallel.anchors import with_layout, with_own_layout
from common.parallel.checks import check_module, refuse_unknown, resolve_topology
from common.parallel.data_parallel import OPEN, DataParallel
from common.parallel.optimizers import LateBackward, check_layout_is_free, is_bucketwise, warn_of_window
from common.simulate.cohort import Cohort
from common.simulate.methods import SharedSecondMoments
from common.topology import Topology
from common.torch_internals import tree_leaves


def simulate(
    module: nn.Module,
    world_size: int,
    method: Literal["decentralized", "allreduce"] = "decentralized",
    topology: str | Topology = "complete",
    workers_per_host: int = 1,
    order: Literal["awc", "atc"] | None = None,
    ranks_per_worker: Annotated[int, Bounds(1, math.inf)] = 1,
    *,
    share_second_moment: Literal["mean", "mixing"] | None = None,
    **options: Any,
) -> list["SimulatedReplica"]:
    """Return N virtual workers that start from copies of `module` (which stays unchanged).

    method: "decentralized" or "allreduce"; topology and order as in DecentralizedDataParallel
    ranks_per_worker: only matters for the bytes that an all-reduce over all ranks would send
    share_second_moment: how workers share their AccumAdamWs' second moments, see SharedSecondMoments; None: not at all
    options: see `common.options.GossipOptions`. bucket_mb only matters where buckets mix differently, with
             phases="staggered" or fragments > 1; with "auto" real workers on GPUs have larger ones: give both a number
             to compare them; shards are cut at other elements than whole replicas

    In each step call forward and backward on every replica, then `synchronize_gradients()` on every replica (before
    clipping), then `optimizer.step()` on every replica.

    Raises ValueError for an argument of another type, an unknown method or order, a topology for another number of
    workers, and local steps that contradict each other or the topology.
    """
    refuse_unknown(simulate, options)
    check_arguments(simulate, locals())
    check_module(module)
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1 simulated worker")
    gossip = GossipOptions(order, **options)
    plan = gossip.plan
    if method == "allreduce" and not plan.every_update:
        raise ValueError(f"local_steps={plan.steps} with method='allreduce': expected method='decentralized'")
    if share_second_moment and not (method == "decentralized" and plan.every_update):
        raise ValueError(
            f"share_second_moment={share_second_moment!r} with method={method!r}, local_steps={plan.steps}: expected "
            "None, or gossip in every update"
        )
    topology = resolve_topology(topology, gossip, world_size, workers_per_host, warns=True)
    modules = [copied(module) for _ in range(world_size)]
    cohort = Cohort(modules, method, topology, gossip, ranks_per_worker)
    replicas = [SimulatedReplica(module, worker, cohort) for worker, module in enumerate(modules)]
    cohort.replicas = replicas
    if share_second_moment:
        cohort.second_moments = SharedSecondMoments(share_second_moment, world_size)
    return replicas


def copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares no memory with the module.

    For tensors that hooks compute and leave on a module, as torch.nn.utils.weight_norm does, the values are copied, not
    the graph, which deepcopy refuses: the next forward computes them anew.
    """
    held = [tensor for part in module.modules() for tensor in tree_leaves(vars(part)) if isinstance(tensor, Tensor)]
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in held if not tensor.is_leaf})


class SimulatedReplica(DataParallel):
    """Worker number `worker` of a cohort. Collective operations act on the whole cohort when called on any replica."""

    def __init__(self, module: nn.Module, worker: int, cohort: Cohort) -> None:
        super().__init__(module, worker, cohort.world_size)
        self._cohort = cohort
        self.topology, self.order, self.plan = cohort.topology, cohort.order, cohort.plan
        if cohort.gossips and self.order == "awc" and self.world_size > 1:
            self._late = LateBackward(self._common)
        self._outside.said |= not cohort.gossips  # gradients of whatever is trained are averaged
        OPEN.add(self)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Attach to `optimizer.step()`, as DecentralizedDataParallel does."""
        if self._cohort.gossips and is_bucketwise(optimizer):
            check_layout_is_free(self.clock, self.communication_state())
        shared = self._cohort.second_moments
        if shared is not None and (not isinstance(optimizer, AccumAdamW) or is_bucketwise(optimizer)):
            raise ValueError(
                f"attach: a {type(optimizer).__name__} with share_second_moment: expected an AccumAdamW that is not "
                "fused (with accumulation_steps=1 it is AdamW)"
            )
        deferred = self._cohort.deferred[self.worker]
        finished_later = self._cohort.gossips and deferred.name_of(optimizer) is not None
        super().attach(optimizer)
        if self._cohort.gossips and self.worker == 0:
            warn_of_window(optimizer, self.plan)
        if shared is not None:
            shared.add(self.worker, optimizer)
        if finished_later:
            deferred.add(optimizer)
        if is_bucketwise(optimizer):
            optimizer.flatten_state(self._cohort.vectors[self.worker], place_gradients=True)
        return optimizer

    def close(self) -> None:
        """Detach from the optimizers; they and the bare module stay usable."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, AccumAdam):
                optimizer.release_state(self._cohort.vectors[self.worker])
        super().close()
        self._cohort.deferred[self.worker].close()

    def _before_forward(self) -> None:
        if self._cohort.updating:
            raise RuntimeError(
                f"simulated worker {self.worker} ran a training forward while others had stepped already: in each "
                "step run forward and backward on every replica first, then step every optimizer"
            )
        for vector in self._cohort.vectors[self.worker]:
            vector.check(f"simulated forward, worker {self.worker}")
        self._cohort.synchronized = False  # a scaler may have skipped the last step

    def synchronize_gradients(self) -> None:
        """Average the gradients of all workers under all-reduce, once for each step."""
        self._cohort.synchronize_gradients()

    def _before_update(self) -> None:
        self._cohort.before_update(self.worker, self._optimizers[0])

    def _after_update(self) -> None:
        self._cohort.after_update(self.worker)

    def _drain(self) -> None:
        """Expect writes to the parameters: rounds that begin next start from the new values."""
        if self._interrupted:
            self._cohort.updating.discard(self.worker)
        self._cohort.anchors.expire()

    def _after_load(self) -> None:
        """Set the anchors to the new parameters, until anchors are loaded too."""
        super()._after_load()
        self._cohort.anchors.overwrite(self.clock, self.worker)
        for anchors, vector in zip(self._cohort.anchors.anchors, self._cohort.vectors[self.worker], strict=False):
            anchors[self.worker, : vector.numel].copy_(vector.data)

    def communication_state(self) -> dict[str, Tensor]:
        """Return this worker's anchors and outer momenta, and the layout of its vectors."""
        state = {name: matrix[self.worker] for name, matrix in self._cohort.anchors.state.items()}
        return with_layout(state, self._cohort.vectors[self.worker])

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`; call it after `load_clock`."""
        super().load_communication_state(with_own_layout(state, self._cohort.vectors[self.worker]))
        self._cohort.anchors.loaded(self.worker)

    def load_clock(self, clock: int) -> None:
        """Continue after `clock` updates. In the middle of a round the communication state must follow."""
        super().load_clock(clock)
        self._cohort.anchors.require(clock)

    def _mean_state(self) -> list[Tensor]:
        return self._cohort.state_of(self.worker)

    def _write_mean(self) -> None:
        self._cohort.write_mean(self.worker)

    def average_(self) -> None:
        """Replace every worker's parameters and buffers by the mean, for good."""
        self._cohort.average_()

    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2)."""
        return self._cohort.consensus_distance()
