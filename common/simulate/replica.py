"""Simulated workers with the contract of the real ones (`common.parallel.DataParallel`).

The workers' parameters are the rows of one matrix X [N, P] for each dtype. In every step all workers first run
forward and backward, then all step: the first `optimizer.step()` of an update does what the messages would have
done, X <- W(t) X, for all workers at once.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.flat import ALIGNMENT_BYTES, FlatVector, flatten
from common.optim import DmSGD, QGDmSGD
from common.parallel.checks import check_order, resolve_topology
from common.parallel.collectives import sum_dtype
from common.parallel.data_parallel import DataParallel, averageable_buffers
from common.parallel.debiasing import Debiasing
from common.parallel.gossip.buckets import plan_buckets
from common.parallel.optimizers import MomentumVectors, is_bucketwise, mixes_momentum, tracks_mixing
from common.simulate.methods import average_gradients_, count_allreduce, count_gossip, mix_
from common.topology import Topology, weights_of
from common.transfer import to_device


def simulate(
    module: nn.Module,
    world_size: int,
    method: str = "decentralized",
    topology: str | Topology = "complete",
    workers_per_host: int = 1,
    order: str = "awc",
    ranks_per_worker: int = 1,
    *,
    bucket_mb: float | Literal["auto"] = "auto",
    phases: str = "aligned",
    push_sum: bool = False,
) -> list["SimulatedReplica"]:
    """Return N virtual workers that start from copies of `module` (which is left alone).

    method: "decentralized" or "allreduce"; topology, order, phases and push_sum as in DecentralizedDataParallel.
    bucket_mb: only matters with phases="staggered", where buckets mix differently; real workers on GPUs have larger
               ones with "auto": give both a number to compare them
    ranks_per_worker: only matters for the bytes that an all-reduce over all ranks would send.
    In each step call forward and backward on every replica, then `synchronize_gradients()` on every replica (before
    clipping), then `optimizer.step()` on every replica.

    Raises ValueError for an unknown method or order, or a topology for another number of workers.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1 simulated worker")
    if method not in ("decentralized", "allreduce"):
        raise ValueError(f"method={method!r}: expected 'decentralized' or 'allreduce'")
    check_order(order)
    topology = resolve_topology(topology, world_size, workers_per_host, push_sum)
    modules = [copy.deepcopy(module) for _ in range(world_size)]
    if phases == "aligned":
        bucket_mb = math.inf  # buckets that all mix alike need not be told apart
    return Cohort(modules, method, topology, order, ranks_per_worker, bucket_mb, phases).replicas


class SimulatedReplica(DataParallel):
    """Worker number `worker` of a cohort. Collective operations act on the cohort when any one replica is asked."""

    def __init__(self, module: nn.Module, worker: int, cohort: "Cohort") -> None:
        super().__init__(module, worker, cohort.world_size)
        self._cohort = cohort
        self.topology, self.order = cohort.topology, cohort.order

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Attach to `optimizer.step()`."""
        mixes = self._cohort.gossips and mixes_momentum(optimizer, self.order, self.topology)
        tracks = self._cohort.gossips and tracks_mixing(optimizer, self.order, self.topology)
        super().attach(optimizer)
        if mixes:
            self._cohort.add_momentum(self.worker, optimizer)
        if tracks:
            optimizer.deferred = True
            self._cohort.tracking[self.worker].append(optimizer)
        if is_bucketwise(optimizer):
            optimizer.flatten_state(self._cohort.vectors[self.worker], place_gradients=True)
        return optimizer

    def close(self) -> None:
        """Detach from the optimizers; the bare module and they stay usable."""
        super().close()
        self._cohort.remove_momentum(self.worker)
        for optimizer in self._cohort.tracking[self.worker]:
            optimizer.deferred = False
        self._cohort.tracking[self.worker].clear()

    def _before_forward(self) -> None:
        if self._cohort.updating:
            raise RuntimeError(
                f"simulated worker {self.worker} ran a training forward while others had stepped already: in each "
                "step run forward and backward on every replica first, then step every optimizer"
            )
        self._cohort.synchronized = False  # a scaler may have skipped the last step

    def synchronize_gradients(self) -> None:
        """Average the gradients of all workers under all-reduce, once for each step."""
        self._cohort.synchronize_gradients()

    def _before_update(self) -> None:
        self._cohort.before_update(self.worker)

    def _after_update(self) -> None:
        self._cohort.after_update(self.worker)

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


class Cohort:
    """All simulated workers: one matrix [N, P] for each dtype, rows are the workers' flat vectors."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        method: str,
        topology: Topology,
        order: str,
        ranks_per_worker: int,
        bucket_mb: float | Literal["auto"],
        phases: str,
    ) -> None:
        self.method, self.topology, self.order = method, topology, order
        self.ranks_per_worker = ranks_per_worker
        self.world_size = len(modules)
        self.modules = list(modules)
        self.stacked, self.vectors = stack(modules)
        self.buckets = plan_buckets([vector.data for vector in self.vectors[0]], topology, bucket_mb, phases)
        self.buffers = [averageable_buffers(module) for module in modules]
        self.debiasing: list[Debiasing] = []  # by worker, where push-sum has something to do
        if self.gossips and not topology.doubly_stochastic:
            rows = [[vector.data for vector in of_worker] for of_worker in self.vectors]
            self.debiasing = [Debiasing(topology, worker, vectors) for worker, vectors in enumerate(rows)]
        self.momentum: dict[int, list[MomentumVectors]] = {}  # by worker, its optimizers in order
        self.tracking: list[list[QGDmSGD]] = [[] for _ in modules]  # by worker
        self.clock = 0
        self.updating: set[int] = set()  # workers that began the current update
        self.updated: set[int] = set()  # workers that finished it
        self.synchronized = False
        self.replicas = [SimulatedReplica(module, worker, self) for worker, module in enumerate(modules)]

    def synchronize_gradients(self) -> None:
        """Average the gradients where the method is all-reduce; on the first call of each step."""
        if self.method == "allreduce" and not self.synchronized and self.world_size > 1:
            average_gradients_([[p for p in m.parameters() if p.requires_grad] for m in self.modules])
            self.synchronized = True

    def before_update(self, worker: int) -> None:
        """Begin a worker's update; the first worker's call mixes for all (awc)."""
        if worker in self.updated:
            raise RuntimeError(
                f"simulated worker {worker} stepped again before workers "
                f"{sorted(set(range(self.world_size)) - self.updated)} stepped: an update is one step of every worker"
            )
        if not self.updating:
            self.clock = self.replicas[0].clock
            self.synchronize_gradients()
            if self.gossips and self.order == "awc":
                self._mix(self.stacked)
        self.updating.add(worker)
        if self.debiasing:
            self.debiasing[worker].remember()

    def after_update(self, worker: int) -> None:
        """End a worker's update; the last worker's call combines (atc) and counts."""
        self.updated.add(worker)
        if self.debiasing:
            self.debiasing[worker].scale(self.clock + (self.order == "awc"))  # of the rounds merged so far
        if len(self.updated) < self.world_size:
            return
        if self.gossips and self.order == "atc":
            for momenta in zip(*self.momentum.values(), strict=True):
                self._mix_momentum(momenta)
            self._mix(self.stacked)
            for optimizer in itertools.chain(*self.tracking):
                optimizer.track()
        self._count()
        self.updating.clear()
        self.updated.clear()
        self.synchronized = False

    def add_momentum(self, worker: int, optimizer: DmSGD) -> None:
        """Have the momentum of this worker's optimizer mixed; all workers attach theirs, in the same order."""
        self.momentum.setdefault(worker, []).append(MomentumVectors(optimizer, self.vectors[worker]))

    def remove_momentum(self, worker: int) -> None:
        """Undo `add_momentum` for all optimizers of this worker."""
        for momentum in self.momentum.pop(worker, ()):
            momentum.close()

    def state_of(self, worker: int) -> list[Tensor]:
        """Return a worker's flat vectors and averaged buffers."""
        return [vector.data for vector in self.vectors[worker]] + self.buffers[worker]

    def write_mean(self, worker: int) -> None:
        """Write the mean of all workers into this one; under all-reduce parameters are equal already."""
        if self.world_size == 1:
            return
        if self.gossips:
            for matrix in self.stacked:
                matrix[worker].copy_(mean(self._weighted(matrix)))
        for tensors in zip(*self.buffers, strict=True):
            tensors[worker].copy_(mean(torch.stack(tensors)))

    def average_(self) -> None:
        """Write the mean of all workers into every worker."""
        if self.world_size == 1:
            return
        self.write_mean(0)
        for worker in range(1, self.world_size):
            for tensor, first in zip(self.state_of(worker), self.state_of(0), strict=True):
                tensor.copy_(first)

    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2) in float64."""
        wide = [matrix.double() for matrix in self.stacked]
        squares = [(m - self._weighted(m).mean(0)).square().sum(1).mean() for m in wide]
        return float(sum(squares)) ** 0.5

    @property
    def gossips(self) -> bool:
        """Whether workers mix parameters, not gradients."""
        return self.method == "decentralized"

    def _weighted(self, matrix: Tensor) -> Tensor:
        """Rows times the workers' push-sum weights."""
        if not self.debiasing:
            return matrix
        weights = weights_of(self.topology, self.replicas[0].clock)
        return matrix * to_device(torch.as_tensor(weights, dtype=sum_dtype(matrix.dtype)), matrix.device)[:, None]

    def _mix(self, matrices: Sequence[Tensor]) -> None:
        for bucket in self.buckets:
            mix_(matrices[bucket.vector][:, bucket.span], bucket.topology.matrix(self.clock))

    def _mix_momentum(self, momenta: Sequence[MomentumVectors]) -> None:
        """m_i <- sum_j w_ij m_j, then every worker descends; momenta[i] is worker i's."""
        rows = list(zip(*(momentum.flat() for momentum in momenta), strict=True))  # [vectors][workers]
        matrices = [torch.stack(workers) for workers in rows]
        self._mix(matrices)
        for workers, matrix in zip(rows, matrices, strict=True):
            for row, mixed in zip(workers, matrix, strict=True):
                row.copy_(mixed)
        for momentum in momenta:
            momentum.descend()

    def _count(self) -> None:
        counters = [replica.counters for replica in self.replicas]
        if not self.gossips:
            trained = [p for p in self.modules[0].parameters() if p.requires_grad]
            ranks = self.world_size * self.ranks_per_worker
            count_allreduce(counters, ranks, sum(p.numel() * p.element_size() for p in trained))
        else:
            optimizers = len(self.momentum.get(0, ()))  # whose momentum travels too
            for bucket in self.buckets:
                chunk = self.vectors[0][bucket.vector].data[bucket.span]
                round_ = bucket.topology.round(self.clock)
                count_gossip(counters, round_, self.topology.workers_per_host, [chunk] * (1 + optimizers))
            for counter in counters:
                counter.rounds += 1


def stack(modules: Sequence[nn.Module]) -> tuple[list[Tensor], list[list[FlatVector]]]:
    """Return matrices [N, P], one for each (dtype, device), whose row i holds module i's parameters as views."""
    matrices: list[Tensor] = []
    vectors: list[list[FlatVector]] = []
    for worker, module in enumerate(modules):
        flat = flatten(module)
        if worker == 0:
            for vector in flat:
                step = max(1, ALIGNMENT_BYTES // vector.data.element_size())
                width = -(-vector.numel // step) * step
                matrices.append(vector.data.new_zeros(len(modules), width))
        vectors.append(
            [vector.move_to(matrix[worker, : vector.numel]) for vector, matrix in zip(flat, matrices, strict=True)]
        )
    return matrices, vectors


def mean(stacked: Tensor) -> Tensor:
    """Return the mean over the workers [N, ...] -> [...]; 16-bit is summed in float32 and rounded once."""
    return stacked.to(sum_dtype(stacked.dtype)).sum(0).div_(len(stacked)).to(stacked.dtype)
