"""All simulated workers together: their parameters as matrices, and their effects on each other in an update."""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.flat import ALIGNMENT_BYTES, FlatVector, flatten
from common.options import GossipOptions
from common.parallel.anchors import Anchors
from common.parallel.averaging import Debiasing, averageable_buffers
from common.parallel.collectives import sum_dtype
from common.parallel.data_parallel import DataParallel
from common.parallel.gossip.buckets import ScheduledBucket, fragments_of, plan_buckets
from common.parallel.optimizers import Deferred, MomentumVectors
from common.simulate.methods import SharedSecondMoments, average_gradients_, count_gossip, mix_
from common.topology import Topology, weights_of
from common.transfer import to_device


class Cohort:
    """All simulated workers: one matrix [N, P] for each dtype, rows are the workers' flat vectors.

    method, ranks_per_worker: as in `common.simulate.simulate`
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        method: str,
        topology: Topology,
        options: GossipOptions,
        ranks_per_worker: int,
    ) -> None:
        self.method, self.topology, self.plan, self.mixing = method, topology, options.plan, options.mixing
        self.order = self.plan.order
        self.ranks_per_worker = ranks_per_worker
        self.world_size = len(modules)
        self.modules = list(modules)
        self.stacked, self.vectors = stack(modules)
        first = [vector.data for vector in self.vectors[0]]
        alike = options.phases == "aligned" and options.fragments == 1  # then buckets need not be told apart
        bucket_mb = math.inf if alike else options.bucket_mb
        self.buckets = plan_buckets(first, topology, bucket_mb, options.phases, options.fragments)
        self.anchors = Anchors(self.plan, self.stacked)
        self.anchors.fragments = fragments_of(self.buckets, options.fragments)
        rows = [[vector.data for vector in of_worker] for of_worker in self.vectors]
        self.debiasing = [Debiasing(topology, worker, vectors) for worker, vectors in enumerate(rows)]
        self.deferred = [Deferred(topology, self.plan, vectors) for vectors in self.vectors]
        self.second_moments: SharedSecondMoments | None = None
        self.clock = 0
        self.strength = 1.0  # of what is mixed
        self.updating: set[int] = set()  # workers that began the current update
        self.updated: set[int] = set()  # workers that finished it
        self.synchronized = False
        self.replicas: Sequence[DataParallel] = ()  # by worker; to be set before first use

    def synchronize_gradients(self) -> None:
        """Average the gradients if the method is all-reduce, on the first call of each step."""
        if self.method == "allreduce" and not self.synchronized and self.world_size > 1:
            average_gradients_([[p for p in m.parameters() if p.requires_grad] for m in self.modules])
            self.synchronized = True

    def before_update(self, worker: int, optimizer: Optimizer) -> None:
        """Begin a worker's update; the first worker's call merges for all."""
        if worker in self.updated:
            raise RuntimeError(
                f"simulated worker {worker} stepped again before workers "
                f"{sorted(set(range(self.world_size)) - self.updated)} stepped: an update is one step of every worker"
            )
        if not self.updating:
            self.clock = self.replicas[0].clock
            self.synchronize_gradients()
            self.check("simulated update")
            self.strength = self.mixing.strength(optimizer, self.clock)
            if self.gossips:
                self.anchors.merge(self.clock, self._merge)
            if self.second_moments is not None:
                self.second_moments.before_update()
        self.updating.add(worker)
        self.debiasing[worker].remember()

    def after_update(self, worker: int) -> None:
        """End a worker's update; the last worker's call ends rounds and counts."""
        self.updated.add(worker)
        self.debiasing[worker].scale(self.clock + (self.order == "awc"))  # of the rounds merged so far
        if len(self.updated) < self.world_size:
            return
        if self.gossips:
            for momenta in zip(*(deferred.momentum for deferred in self.deferred), strict=True):
                self._mix_momentum(momenta)
            self.anchors.end(self.clock, self._merge)
            if self.second_moments is not None:
                self.second_moments.after_update(self.topology.matrix(self.clock))
            for deferred in self.deferred:
                deferred.track()
        else:
            self._count_allreduce()
        self.updating.clear()
        self.updated.clear()
        self.synchronized = False

    def state_of(self, worker: int) -> list[Tensor]:
        """Return a worker's flat vectors and averaged buffers."""
        return [vector.data for vector in self.vectors[worker]] + averageable_buffers(self.modules[worker])

    def check(self, where: str) -> None:
        """Raise RuntimeError naming the first parameter of a worker that is no longer in the matrices."""
        for worker, vectors in enumerate(self.vectors):
            for vector in vectors:
                vector.check(f"{where}, worker {worker}")

    def write_mean(self, worker: int) -> None:
        """Write the mean of all workers into this one; under all-reduce parameters are equal already."""
        self._refuse_averaged()
        if self.world_size == 1:
            return
        self.check("simulated average")
        if self.gossips:
            for matrix in self.stacked:
                matrix[worker].copy_(mean(self._weighted(matrix)))
        for tensors in zip(*map(averageable_buffers, self.modules), strict=True):
            values = mean(stacked := torch.stack(tensors))
            if not values.isfinite().all():  # as in `average_buffers_`
                values = mean(stacked.to(torch.promote_types(stacked.dtype, torch.float64)))
            tensors[worker].copy_(values)

    def average_(self) -> None:
        """Write the mean of all workers into every worker."""
        if self.world_size == 1:
            return
        self.write_mean(0)
        for worker in range(1, self.world_size):
            for tensor, first in zip(self.state_of(worker), self.state_of(0), strict=True):
                tensor.copy_(first)
        for matrix in self.anchors.state.values():
            matrix.copy_(mean(matrix))
        self._count_writes()
        self.anchors.expire()

    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2) in float64."""
        self._refuse_averaged()
        self.check("simulated consensus distance")
        wide = [matrix.cdouble() if matrix.is_complex() else matrix.double() for matrix in self.stacked]
        squares = [(m - self._weighted(m).mean(0)).abs().square().sum(1).mean() for m in wide]
        return float(sum(squares)) ** 0.5

    def _refuse_averaged(self) -> None:
        """Raise RuntimeError inside any worker's `averaged()` block, where its parameters are the mean."""
        for replica in self.replicas:
            if replica.is_averaged:
                raise RuntimeError(
                    f"an average inside `with replica.averaged()` of simulated worker {replica.worker}: leave the "
                    "block first, at whose end its own parameters come back"
                )

    @property
    def gossips(self) -> bool:
        """Whether workers mix parameters, instead of averaging gradients."""
        return self.method == "decentralized"

    def _weighted(self, matrix: Tensor) -> Tensor:
        """Return the rows times the workers' push-sum weights."""
        if not self.debiasing[0].needed:
            return matrix
        weights = weights_of(self.topology, self.replicas[0].clock)
        return matrix * to_device(torch.as_tensor(weights, dtype=sum_dtype(matrix.dtype)), matrix.device)[:, None]

    def _merge(self, fragment: int, following: Sequence[Tensor]) -> None:
        """Mix a fragment, and add the change to the tensors in `following`."""
        mixed = self.anchors.anchors if self.plan.sends_anchors else self.stacked
        round_ = self.plan.merged(self.clock, fragment)
        buckets = [bucket for bucket in self.buckets if bucket.fragment == fragment]
        counters = [replica.counters for replica in self.replicas]
        optimizers = len(self.deferred[0].momentum)  # whose momentum travels too
        for bucket in buckets:
            part = mixed[bucket.vector][:, bucket.span]
            before = part.clone() if following else None
            mix_(part, self._matrix(bucket, round_))
            if before is not None:
                following[bucket.vector][:, bucket.span] += part - before
            chunk = self.vectors[0][bucket.vector].data[bucket.span]
            hosts = self.topology.workers_per_host
            count_gossip(counters, bucket.topology.round(round_), hosts, [chunk] * (1 + optimizers))
        for counter in counters:
            counter.rounds += 1
        if self.world_size > 1:
            self._count_writes()

    def _count_writes(self) -> None:
        """Make autograd refuse graphs of the parameters' old values."""
        for vector in chain(*self.vectors):
            torch.autograd.graph.increment_version(vector.parameters)

    def _matrix(self, bucket: ScheduledBucket, round_: int) -> np.ndarray:
        W = bucket.topology.matrix(round_)
        return W if self.strength == 1 else (1 - self.strength) * np.eye(len(W)) + self.strength * W

    def _mix_momentum(self, momenta: Sequence[MomentumVectors]) -> None:
        """Compute m_i <- sum_j w_ij m_j, then let every worker descend; momenta[i] is worker i's."""
        rows = list(zip(*(momentum.flat() for momentum in momenta), strict=True))  # [vectors][workers]
        matrices = [torch.stack(workers) for workers in rows]
        for bucket in self.buckets:
            mix_(matrices[bucket.vector][:, bucket.span], self._matrix(bucket, self.clock))
        for workers, matrix in zip(rows, matrices, strict=True):
            for row, mixed in zip(workers, matrix, strict=True):
                row.copy_(mixed)
        for momentum in momenta:
            momentum.optimizer.descend()

    def _count_allreduce(self) -> None:
        """Count what a rank would have sent in a ring all-reduce of the gradients."""
        ranks = self.world_size * self.ranks_per_worker
        gradient_bytes = sum(p.nbytes for p in self.modules[0].parameters() if p.requires_grad)
        for replica in self.replicas:
            replica.counters.rounds += 1
            replica.counters.bytes_sent += 2 * (ranks - 1) / ranks * gradient_bytes
            replica.counters.messages += 2 * (ranks - 1)


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
    """Return the mean over the workers [N, ...] -> [...]; 16-bit values are summed in float32 and rounded once."""
    return stacked.to(sum_dtype(stacked.dtype)).sum(0).div_(len(stacked)).to(stacked.dtype)
