"""Decentralized data parallelism: workers average parameters with a few peers instead of all gradients.

Adapt while communicating (`awc`, arXiv 2410.11998): x_i(t+1) = sum_j W_ij(t) x_j(t) + d_i(t). The messages of step t
travel during its forward and backward pass; `optimizer.step()` first merges them, then updates the merged value with
the gradient taken at x_i(t), then launches the next round.

Adapt then combine (`atc`, the DmSGD of arXiv 2110.13363): x_i(t+1) = sum_j W_ij(t) (x_j(t) + d_j(t)). Nothing
to overlap with: `optimizer.step()` updates, then exchanges.

With local steps only every H-th update is one of these; `common.local_steps` has the rule.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from common.arguments import check_arguments
from common.local_steps import Mixing, Outer, check_topology, resolve_local_steps, warnings_of
from common.optim import AccumAdam, QGDmSGD
from common.parallel.anchors import Anchors, numbered, with_layout, with_own_layout
from common.parallel.averaging import average_buffers_, consensus_distance
from common.parallel.checks import (
    check_device,
    check_equal_on_all_ranks,
    check_message_dtype,
    check_module,
    check_ownership,
    check_sizes,
    refuse_unknown,
    resolve_topology,
    workers_of_host,
)
from common.parallel.collectives import PeerError, mean_over_ranks_
from common.parallel.data_parallel import OPEN, DataParallel, averageable_buffers
from common.parallel.debiasing import Debiasing
from common.parallel.gossip import Mixer
from common.parallel.gossip.buckets import fragments_of
from common.parallel.meeting import Place, meet
from common.parallel.mesh import ranks_per_worker_of
from common.parallel.optimizers import (
    BucketwiseOptimizer,
    MomentumVectors,
    check_layout_is_free,
    is_bucketwise,
    mixes_momentum,
    tracks_mixing,
    warn_of_window,
)
from common.parallel.process_groups import ProcessGroups, patience
from common.parallel.sharded import replica_of
from common.topology import Topology


class DecentralizedDataParallel(DataParallel):
    """Gossip in three lines.

        model = DecentralizedDataParallel(model, topology="one_peer_exponential")
        optimizer = AccumAdamW(model.parameters(), lr=6e-4)
        model.attach(optimizer)

    module:           a module whose device, dtype and memory format are final; its trainable parameters become views
                      of flat vectors. Gossip mixes these: what an optimizer trains besides, such as a parameter that
                      is frozen now, every worker trains for itself (with a warning), and what forward writes into a
                      frozen parameter or a buffer stays local. Rank 0's parameters and buffers are broadcast.
                      Or a module to which `fully_shard` was applied over the ranks of each worker, see
                      `common.parallel.sharded`
    topology:         a name of `common.topology.NAMES` or a Topology over the workers
    order:            "awc" or "atc", see above; None: "atc" if merge_after is 0, else "awc"
    ranks_per_worker: ranks that share one replica: gradients are averaged among them (DDP or FSDP), gossip runs
                      between workers (arXiv 2110.13363 treats a server of 8 GPUs as one node). None: 1
    mesh:             instead of ranks_per_worker: all ranks, in dimensions "replicate", along which gossip runs, and,
                      for modules with shards, "shard"
    workers_per_host: for topologies that know hosts (aer) and for how rounds travel; only used with a name, a Topology
                      has its own. None: 1, with a warning where that is another number than the launcher's and matters
    bucket_mb:        MiB of a message; 1-2 suit slow links; "auto": 2 on the CPU, 64 on a GPU. An all-reduce cuts a
                      bucket into a message for each member, there buckets are as many times larger (at most 25)
    transport:        "auto", "send_recv" or "subgroup" (where a round averages in groups)
    message_dtype:    dtype of messages between peers; None: the parameters' own; torch.int8: 8 bits with error feedback
                      (one more vector). Not of all-reduces, nor inside hosts that talk to others
    phases:           "aligned", or "staggered": half of the buckets run the rounds in another order, so that with AER
                      every host sends half of its bytes in each step instead of all in every second one
    push_sum:         stochastic gradient push (SGP): also for topologies that do not keep the mean (directed graphs
                      whose ranks take more or less than they give); the same as without it where they do
    timeout_s:        seconds to wait for a peer before an error names it, also while one rank evaluates or saves alone;
                      with local steps a peer may be as late as workers drift apart in H updates

    local_steps:      H, updates in a round (the rule: `common.local_steps`): a step sends 1/H of the bytes, and between
                      exchanges it runs the operations of the bare optimizer only
    outer:            the outer optimizer; Outer() is none (local SGD). It keeps one vector of the parameters' size, the
                      anchors (outer parameters), and with momentum one more
    merge_after:      tau: merge a round before its tau-th update; its messages travel until then. Above 1 anchors are
                      kept in any case. 0: exchange at its end, as order "atc" does. None: H/3, rounded up
    local_steps_from: updates before this one are rounds by themselves (post-local SGD)
    fragments:        number of runs of buckets, whatever layers these belong to, that take turns within H updates
    mixing:           how strongly rounds mix as the learning rate falls (DSGD-AC)

    `averaged()`, `consensus_distance()` and `state_dict()` are of the inner parameters, which the optimizer updates; at
    the end of a round they equal the outer ones. `average_()` averages anchors and outer momenta too.

    All ranks must construct it, with the same arguments and a module of the same structure; a difference raises
    RuntimeError on every rank. Without a process group, or with one rank, only an outer optimizer does anything; there
    is no `process_group`, gossip among a part of the ranks. Raises ValueError for an argument of another type or out of
    range, and for a parameter that another wrapper holds, until that is closed.
    """

    def __init__(
        self,
        module: nn.Module,
        topology: str | Topology,
        order: Literal["awc", "atc"] | None = None,
        ranks_per_worker: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        local_steps: int = 1,
        outer: Outer | None = None,
        merge_after: int | None = None,
        local_steps_from: int = 0,
        fragments: int = 1,
        mixing: Mixing | None = None,
        workers_per_host: int | None = None,
        bucket_mb: float | Literal["auto"] = "auto",
        transport: Literal["auto", "send_recv", "subgroup"] = "auto",
        message_dtype: torch.dtype | None = None,
        phases: Literal["aligned", "staggered"] = "aligned",
        push_sum: bool = False,
        find_unused_parameters: bool = False,
        timeout_s: float = 600.0,
        **unknown: Any,
    ) -> None:
        refuse_unknown("DecentralizedDataParallel", unknown, inspect.signature(DecentralizedDataParallel).parameters)
        check_arguments(DecentralizedDataParallel.__init__, locals())
        check_module(module)
        check_ownership(module)
        plan = resolve_local_steps(order, local_steps, outer, merge_after, local_steps_from, fragments)
        mixing = mixing or Mixing()
        if isinstance(topology, Topology):
            check_topology(plan, mixing, topology, push_sum)
        check_sizes(bucket_mb, timeout_s)
        check_message_dtype(message_dtype, module.parameters())
        device = check_device(p for p in module.parameters() if p.requires_grad)
        timeout = timedelta(seconds=timeout_s)
        if mesh is not None:
            ranks_per_worker = ranks_per_worker_of(mesh, module, ranks_per_worker)
        groups = ProcessGroups(1 if ranks_per_worker is None else ranks_per_worker, patience(timeout, device))
        super().__init__(module, groups.worker, groups.workers, groups.world)
        workers_per_host = workers_of_host(workers_per_host, topology, groups.ranks_per_worker, groups.rank)
        self.topology = resolve_topology(topology, groups.workers, workers_per_host, push_sum)
        check_topology(plan, mixing, self.topology, push_sum)
        for sentence in warnings_of(plan, self.topology) if groups.rank == 0 else ():
            warnings.warn(sentence, stacklevel=2)
        self._plan, self._mixing, self._groups, self.order = plan, mixing, groups, plan.order
        self._replica = replica_of(self.bare_module, groups, find_unused_parameters)
        facts = {
            "topology": str(self.topology),
            "the topology's rounds": self.topology.fingerprint(),
            "order": self.order,
            "local steps": plan,
            "mixing": mixing,
            "bucket_mb": bucket_mb,
            "transport": transport,
            "message_dtype": str(message_dtype),
            "phases": phases,
            "sharding": self._replica.placements(),
            "find_unused_parameters": find_unused_parameters,
        }
        check_equal_on_all_ranks(facts, groups.world, self.bare_module)
        self._replica.broadcast()
        self._vectors = self._replica.vectors()
        self._flat = [vector.data for vector in self._vectors]
        self._common = {parameter for vector in self._vectors for parameter in vector.parameters}
        self._anchors = Anchors(plan, self._flat)
        self.mixer = Mixer(
            self._vectors,
            self.topology,
            groups,
            bucket_mb=bucket_mb,
            transport=transport,
            message_dtype=message_dtype,
            phases=phases,
            timeout=timeout,
            anchors=self._anchors.anchors if plan.sends_anchors else (),
            fragments=fragments,
            unit="step" if plan.steps == 1 else "round",
        )
        self._anchors.fragments = fragments_of(self.mixer.buckets, fragments)
        self.counters = self.mixer.counters
        self._debiasing = Debiasing(self.topology, groups.worker, self._flat)
        self._momentum: list[MomentumVectors] = []
        self._tracking: list[QGDmSGD] = []
        self._bucketwise: BucketwiseOptimizer | None = None
        if groups.within_worker is not None and not self._replica.averages_gradients:
            self._average_gradients(groups.within_worker, find_unused_parameters=find_unused_parameters)
        OPEN.add(self)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Attach to `optimizer.step()`; on every rank, in the same order. Collective.

        A wrapper may have several optimizers, and an optimizer several wrappers: each mixes its own module's parameters
        and nothing else. Of one wrapper alone are DmSGD with momentum mixing and QGDmSGD, whose steps the wrapper
        finishes; a second attach raises ValueError. A fused AccumAdam(W) of several wrappers, or one of several
        optimizers, updates whole vectors. Hooks of `optimizer.step()` that were registered before see, with order
        "atc", parameters before they are mixed: register an average of weights after attaching.

        DmSGD with momentum mixing has its momentum placed in flat vectors too; QGDmSGD finishes its step after the
        exchange. Alone, with order "awc" and without local steps, a fused AccumAdam(W) steps bucket by bucket: merging
        costs it no pass over memory, and messages leave earlier. With accumulation_steps=1 it is Adam(W). Torch's own
        optimizers update all parameters in one call, after the last bucket has arrived; to update only some of them
        one would have to hide the gradients of the others.
        """
        check_arguments(DataParallel.attach, locals())
        mixes = mixes_momentum(optimizer, self.order, self.topology, self._plan)
        tracks = tracks_mixing(optimizer, self.order, self.topology, self._plan)
        if (mixes or tracks) and self.mixer.errors:
            name = "DmSGD(momentum_mixing=True)" if mixes else "QGDmSGD"
            raise ValueError(f"{name}: expected messages of 16 bits or more, got message_dtype=int8")
        if is_bucketwise(optimizer):
            check_layout_is_free(self.clock, self.communication_state())
        self._reshard()
        self._replica.check_optimizer(optimizer)
        fused = {"whether the optimizer is a fused AccumAdam(W)": is_bucketwise(optimizer)}
        check_equal_on_all_ranks(fused, self._groups.world)
        super().attach(optimizer)
        if self._groups.rank == 0:
            warn_of_window(optimizer, self._plan)
        if mixes:
            self._momentum.append(MomentumVectors(optimizer, self._vectors))
        if tracks:
            optimizer.deferred = True
            self._tracking.append(optimizer)
        self._step_by_bucket(optimizer)
        return optimizer

    def _step_by_bucket(self, optimizer: Optimizer | None) -> None:
        """Let the optimizer's step go bucket by bucket if it can and is the only one; take that from any other."""
        if self._steps_by_bucket():
            self._bucketwise.arriving = None
        self._bucketwise = None
        if optimizer is None or not is_bucketwise(optimizer):
            return
        self.drain()
        optimizer.flatten_state(self._vectors, place_gradients=self._ddp is None)
        names = [slot.name for vector in self._vectors for slot in vector.slots]
        check_equal_on_all_ranks({"the order of the optimizer's parameters": names}, self._groups.world)
        alone = len(self._optimizers) == 1 and self.world_size > 1 and optimizer.has_flat(self._vectors)
        if alone and not self._debiasing.needed and self.order == "awc" and self._plan.every_update:
            optimizer.arriving = self.mixer.arriving
            self._bucketwise = optimizer

    def _steps_by_bucket(self) -> bool:
        optimizer = self._bucketwise
        if optimizer is None or optimizer.arriving != self.mixer.arriving:  # another wrapper's attach ended it
            return False
        if not is_bucketwise(optimizer):  # a group was added
            optimizer.arriving = None
        return optimizer.arriving is not None

    def _before_forward(self) -> None:
        self._launch()  # the first round, and the one after an average: later ones follow an update

    def _before_update(self) -> None:
        self._reshard()
        self._anchors.prepare(self.clock)
        self.mixer.strength = self._mixing.strength(self._optimizers[0], self.clock)
        if not self._steps_by_bucket():  # else buckets are merged inside the step
            self._anchors.merge(self.clock, self.mixer.merge)
        self._debiasing.remember()

    def _after_update(self) -> None:
        self._debiasing.scale(self.mixer.clock)  # of the rounds merged so far
        for momentum in self._momentum:
            self.mixer.mix_now(momentum.flat())  # m_i <- sum_j w_ij (beta m_j + g_j)
            momentum.descend()
        self._anchors.end(self.clock, self.mixer.merge)
        for optimizer in self._tracking:
            optimizer.track()

    def _after_commit(self) -> None:
        self._launch()  # unless it was done bucket by bucket

    def _launch(self) -> None:
        self._anchors.prepare(self.clock)
        # What is merged before the next update must not be written until then: with anchors it would be lost.
        writable = self._plan.sends_anchors and not self._plan.merges_at_beginning(self.clock)
        for fragment in self._plan.launched(self.clock):
            self.mixer.launch(fragment, writable=writable)

    def _meet(self, place: Place) -> None:
        if self.everyone is not None and self.mixer.abort is None:  # who survives others has other ways to agree
            meet(place._replace(launched=self.mixer.in_flight), self.everyone)

    @property
    def _connected(self) -> bool:
        return self.everyone is None or self._groups.usable

    def _drain(self) -> None:
        """Drop what is in flight, so that parameters may be written: within a round, as a local step."""
        self.mixer.drain()
        if self._interrupted:
            self._set_rounds()
        self._anchors.expire()
        self._reshard()

    def _reshard(self) -> None:
        self._replica.reshard()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: wrap all but the last backward of a step. Averages inside a worker wait."""
        return self._replica.no_sync() if self._replica.averages_gradients else super().no_sync()

    def _after_load(self) -> None:
        """Have anchors be the new parameters, until they are loaded too."""
        super()._after_load()
        self._anchors.overwrite(self.clock)
        self._anchors.reset()

    def survive(self, abort: Callable[[], None]) -> None:
        """Finish an update without the buckets that fail, instead of raising: they and all later ones mix with W = I.

        abort: called at the first failure; has to close all connections, see `abort_groups`

        `check_peers` tells after the update; the next one needs another wrapper.
        """
        self.mixer.abort = abort

    @property
    def merged_of_broken(self) -> int | None:
        """Exchanges of buckets merged in the update that failed, of momentum before parameters; None while none has."""
        return self.mixer.broken

    def check_peers(self) -> None:
        """Raise PeerError after an update that had to do without some of the peers."""
        if self.mixer.broken is not None:
            raise PeerError(f"rank {self._groups.rank}: peers were lost in step {self.clock - 1}")

    def abandon(self) -> None:
        """Detach from the optimizers without waiting for peers, after all connections were closed."""
        self.mixer.abandon()
        self._release(clean=False, patient=False)

    def _release(self, clean: bool, patient: bool) -> None:
        attached = list(self._optimizers)
        super()._release(clean, patient)
        self._step_by_bucket(None)
        for optimizer in attached:
            if isinstance(optimizer, AccumAdam):
                optimizer.release_state(self._vectors)
        for momentum in self._momentum:
            momentum.close()
        self._momentum.clear()
        for optimizer in self._tracking:
            optimizer.deferred = False
        self._tracking.clear()
        if clean:
            self.mixer.close()
        if clean or self.mixer.end(patient):
            self._groups.close()

    def communication_state(self) -> dict[str, Tensor]:
        """Return anchors, outer momenta, and what messages of 8 bits have left out so far, one of each for a vector.

        And the layout of the vectors, which depends on the optimizers attached.
        """
        return with_layout(self._anchors.state | numbered("message_error", self.mixer.errors), self._vectors)

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`; after `load_clock`. Collective: drains first."""
        super().load_communication_state(with_own_layout(state, self._vectors))
        self._anchors.loaded()

    def load_clock(self, clock: int) -> None:
        """Continue after `clock` updates. In the middle of a round the communication state must follow. Collective."""
        super().load_clock(clock)
        self._set_rounds()
        self._anchors.require(clock)

    def _set_rounds(self) -> None:
        """Have the mixer continue with the rounds that come after `clock` updates."""
        for fragment in range(self._plan.fragments):
            self.mixer.set_clock(self._plan.merged(self.clock, fragment), fragment)

    def average_(self) -> None:
        """Replace parameters, anchors, outer momenta and buffers by their means, for good. Collective."""
        self._begin("average_()")
        self._drain()
        self._write_mean()
        mean_over_ranks_(list(self._anchors.state.values()), *self._replica.peers)

    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2), equal on all ranks. Collective."""
        self._begin("consensus_distance()")
        self._check_vectors("consensus distance")
        weight = self._debiasing.weight(self.clock)
        return consensus_distance(self._flat, *self._replica.peers, weight, everyone=self._groups.world)

    def _check_vectors(self, where: str) -> None:
        """Raise RuntimeError naming the first parameter that left its vector, of which it would be no mean."""
        for vector in self._vectors:
            vector.check(where)

    def _mean_state(self) -> list[Tensor]:
        return self._flat + averageable_buffers(self.bare_module)

    def _write_mean(self) -> None:
        self.mixer.wait()  # sends read the vectors in place; what arrived stays valid if they are restored
        self._reshard()
        self._check_vectors("average")
        for vector in self._flat if self._debiasing.needed else ():
            vector.mul_(self._debiasing.weight(self.clock))
        mean_over_ranks_(self._flat, *self._replica.peers)
        average_buffers_(averageable_buffers(self.bare_module), self._groups.world_size, self._groups.world)
