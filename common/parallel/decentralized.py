"""Decentralized data parallelism: workers average parameters with a few peers instead of gradients with all.

Adapt while communicating (`awc`, arXiv 2410.11998): x_i(t+1) = sum_j W_ij(t) x_j(t) + d_i(t). The messages of step t
travel during its forward and backward pass; `optimizer.step()` first merges them, then updates the merged value with
the gradient taken at x_i(t), then launches the next round.

Adapt then combine (`atc`, the DmSGD of arXiv 2110.13363): x_i(t+1) = sum_j W_ij(t) (x_j(t) + d_j(t)). Nothing
to overlap with: `optimizer.step()` updates, then exchanges.

With local steps only every H-th update is one of these; `common.options` has the rule.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.arguments import TIMEOUT_S, check_arguments
from common.optim import AccumAdam
from common.options import GossipOptions
from common.parallel.anchors import Anchors, numbered, with_layout, with_own_layout
from common.parallel.averaging import Debiasing, average_buffers_, averageable_buffers, consensus_distance
from common.parallel.checks import (
    check_equal_on_all_ranks,
    check_message_dtype,
    check_unwrapped,
    refuse_unknown,
    resolve_topology,
    workers_of_host,
)
from common.parallel.collectives import PeerError, Place, mean_over_ranks_, meet
from common.parallel.data_parallel import OPEN, DataParallel
from common.parallel.gossip import Mixer
from common.parallel.gossip.buckets import fragments_of
from common.parallel.optimizers import Deferred, LateBackward, check_layout_is_free, is_bucketwise, warn_of_window
from common.parallel.process_groups import ProcessGroups, group_timeout
from common.parallel.replica import replica_of
from common.topology import Topology


class DecentralizedDataParallel(DataParallel):
    """Gossip in three lines.

        model = DecentralizedDataParallel(model, topology="one_peer_exponential")
        optimizer = AccumAdamW(model.parameters(), lr=6e-4)
        model.attach(optimizer)

    module:           a module whose device, dtype and memory format are final; its trainable parameters become views
                      of flat vectors. Only these are mixed: parameters that are frozen now and trained later stay local
                      to each worker (with a warning), and so does what forward writes into a frozen parameter or a
                      buffer. Rank 0's parameters and buffers are broadcast. It may be one to which `fully_shard`
                      was applied over the ranks of each worker, see `common.parallel.replica`
    topology:         a name of `common.topology.NAMES` or a Topology over the workers
    order:            "awc" or "atc", see above; None: "atc" if merge_after is 0, else "awc"
    ranks_per_worker: ranks that share one replica: gradients are averaged among them (DDP or FSDP), gossip runs
                      between workers (arXiv 2110.13363 treats a server of 8 GPUs as one node)
    workers_per_host: workers on each host, for topologies that know hosts (aer) and for how rounds travel; ignored if
                      `topology` is a Topology, which carries it. None: 1, with a warning if the launcher announces
                      another number and it matters
    transport:        "auto", "send_recv" or "subgroup" (where a round averages in groups)
    message_dtype:    dtype of messages between peers; None: the parameters' own; torch.int8: 8 bits with error feedback
                      (one more vector). All-reduces and averages inside hosts keep full precision
    find_unused_parameters: as in DDP, where several ranks share a replica
    timeout_s:        seconds to wait for a peer before an error names it, also while one rank evaluates or saves alone;
                      with local steps it must also cover the time by which workers drift apart in H updates
    options:          what is computed: local_steps, outer, merge_after, local_steps_from, fragments, mixing, bucket_mb,
                      phases and push_sum, see `common.options.GossipOptions`

    `averaged()`, `consensus_distance()` and `state_dict()` refer to the inner parameters, which the optimizer
    updates; at the end of a round they equal the outer ones. `average_()` averages anchors and outer momenta too.

    All ranks must construct it, with the same arguments and a module of the same structure; a difference raises
    RuntimeError on every rank. Without a process group, or with one rank, only an outer optimizer does anything. There
    is no `process_group` argument, for gossip among some ranks. Raises ValueError for an argument of another type or
    out of range, and for a parameter that another wrapper holds and has not released by close().
    """

    def __init__(
        self,
        module: nn.Module,
        topology: str | Topology,
        order: Literal["awc", "atc"] | None = None,
        ranks_per_worker: int = 1,
        *,
        workers_per_host: int | None = None,
        transport: Literal["auto", "send_recv", "subgroup"] = "auto",
        message_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
        timeout_s: Annotated[float, TIMEOUT_S] = 600.0,
        **options: Any,
    ) -> None:
        refuse_unknown(DecentralizedDataParallel, options)
        check_arguments(DecentralizedDataParallel.__init__, locals())
        device = check_unwrapped(module)
        gossip = GossipOptions(order, **options)
        if isinstance(topology, Topology):
            gossip.check_topology(topology)  # before process groups are made
        check_message_dtype(message_dtype, module.parameters())
        timeout = timedelta(seconds=float(timeout_s))
        groups = ProcessGroups(ranks_per_worker, group_timeout(timeout, device))
        super().__init__(module, groups.worker, groups.workers, groups.world)
        workers_per_host = workers_of_host(workers_per_host, topology, groups.ranks_per_worker, groups.rank)
        self.topology = resolve_topology(topology, gossip, groups.workers, workers_per_host, warns=groups.rank == 0)
        self._plan, self._mixing, self._groups, self.order = gossip.plan, gossip.mixing, groups, gossip.plan.order
        self._replica = replica_of(self.bare_module, groups, find_unused_parameters)
        self._outside.said |= groups.workers == 1 and self._replica.averages_gradients
        carried = {"transport": transport, "message_dtype": message_dtype}
        self._agree(gossip, {**carried, "find_unused_parameters": find_unused_parameters})
        self._replica.broadcast()
        self._vectors = self._replica.vectors()
        self._flat = [vector.data for vector in self._vectors]
        self._common = {parameter for vector in self._vectors for parameter in vector.parameters}
        self._late = LateBackward(self._common if self.order == "awc" and self.world_size > 1 else ())
        # What local steps add to the plain step; None: every update is a round.
        self._local = None if self._plan.every_update else Anchors(self._plan, self._flat)
        mixed = self._local.anchors if self._local is not None and self._plan.sends_anchors else ()
        self.mixer = Mixer(self._vectors, self.topology, groups, gossip, timeout=timeout, anchors=mixed, **carried)
        if self._local is not None:
            self._local.fragments = fragments_of(self.mixer.buckets, self._plan.fragments)
        self.counters = self.mixer.counters
        self._debiasing = Debiasing(self.topology, groups.worker, self._flat)
        self._deferred = Deferred(self.topology, self._plan, self._vectors)
        self._bucketwise: AccumAdam | None = None
        if self._vectors and groups.within_worker is not None and not self._replica.averages_gradients:
            self._average_gradients(groups.within_worker, find_unused_parameters=find_unused_parameters)
        OPEN.add(self)

    def _agree(self, gossip: GossipOptions, others: Mapping[str, Any]) -> None:
        """Raise RuntimeError on every rank unless all ranks have the same module and options. Collective."""
        facts = {"topology": str(self.topology), "the topology's rounds": self.topology.fingerprint()}
        facts |= gossip.keywords() | {"order": gossip.plan.order, "merge_after": gossip.plan.merge_after}
        facts |= {**others, "sharding": self._replica.placements()}
        check_equal_on_all_ranks(facts, self._groups.world, self.bare_module)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Attach to `optimizer.step()`; on every rank, in the same order. Collective.

        A wrapper may have several optimizers, and an optimizer several wrappers: each mixes its own module's parameters
        and nothing else. DmSGD with momentum mixing and QGDmSGD, whose steps the wrapper finishes after the exchange,
        belong to one wrapper; a second attach raises ValueError. With order "atc", hooks of `optimizer.step()` that
        were registered before attaching see parameters before they are mixed: register weight averaging afterwards.
        With "awc" every backward of an update comes before its first step, which mixes all parameters: a later one
        raises RuntimeError, as where optimizers step inside backward. `zero_grad(set_to_none=False)` hides it.

        As the only optimizer, with order "awc" and without local steps, a fused AccumAdam(W) steps bucket by bucket:
        merging takes no extra pass over memory, and messages leave earlier. Others update when all buckets arrived.
        """
        check_arguments(DataParallel.attach, locals())
        self._begin("attach()")
        name = self._deferred.name_of(optimizer)
        if name and self.mixer.errors:
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
        if name:
            self._deferred.add(optimizer)
        self._step_by_bucket(optimizer)
        return optimizer

    def _step_by_bucket(self, optimizer: Optimizer | None) -> None:
        """Make the optimizer step bucket by bucket if it can and is the only one; stop any other from doing so."""
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
        if alone and not self._debiasing.needed and self.order == "awc" and self._local is None:
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
        self._launch()  # the first round, and the one after an average; all others are launched after an update

    def _before_update(self) -> None:
        self._reshard()
        if self._mixing.power:
            self.mixer.strength = self._mixing.strength(self._optimizers[0], self.clock)
        if self._local is not None:
            self._local.merge(self.clock, self.mixer.merge)
        elif self.order == "awc" and not self._steps_by_bucket():  # else buckets are merged inside the step
            self.mixer.merge()
        self._debiasing.remember()

    def _after_update(self) -> None:
        self._debiasing.scale(self.mixer.clock)  # by the weight that follows from the rounds merged so far
        for momentum in self._deferred.momentum:
            self.mixer.mix_now(momentum.flat())  # m_i <- sum_j w_ij (beta m_j + g_j)
            momentum.optimizer.descend()
        if self._local is not None:
            self._local.end(self.clock, self.mixer.merge)
        elif self.order == "atc":
            self.mixer.merge()
        self._deferred.track()

    def _after_commit(self) -> None:
        self._launch()  # unless it was done bucket by bucket

    def _launch(self) -> None:
        if self._local is not None:
            self._local.launch(self.clock, self.mixer.launch)
        elif self.order == "awc":
            self.mixer.launch()

    def _meet(self, place: Place) -> None:
        if self.everyone is not None and self.mixer.abort is None:  # ranks that survive others agree in other ways
            meet(place._replace(launched=self.mixer.in_flight), self.everyone)

    def _drain(self) -> None:
        """Drop messages in flight, so that parameters may be written; within a round this acts like a local step."""
        self.mixer.drain()
        if self._interrupted:
            self._set_rounds()
        if self._local is not None:
            self._local.expire()
        self._reshard()

    def _reshard(self) -> None:
        self._replica.reshard()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: wrap all but the last backward of a step. Averages inside a worker wait."""
        return self._replica.no_sync() if self._replica.averages_gradients else super().no_sync()

    def _after_load(self) -> None:
        """Set the anchors to the new parameters, until anchors are loaded too."""
        super()._after_load()
        if self._local is not None:
            self._local.overwrite(self.clock)
            self._local.reset()

    def survive(self, abort: Callable[[], None], aborted: Callable[[], bool] = lambda: False) -> None:
        """Finish an update without the buckets that fail, instead of raising: they and all later ones mix with W = I.

        abort:   called at the first failure; has to close all connections, see `abort_groups`
        aborted: whether messages that have arrived may be torn

        `check_peers` reports it after the update; the next update needs another wrapper.
        """
        self.mixer.abort, self.mixer.aborted = abort, aborted

    @property
    def merged_of_broken(self) -> int | None:
        """Number of bucket exchanges merged in the update that failed, momentum before parameters; None before that."""
        return self.mixer.broken

    def check_peers(self) -> None:
        """Raise PeerError after an update that had to do without some of the peers, or if connections are closed."""
        if self.mixer.broken is not None or self.mixer.aborted():
            raise PeerError(f"rank {self._groups.rank}: peers were lost in step {self.clock - 1}")

    def abandon(self) -> None:
        """Detach from the optimizers without waiting for peers, after all connections were closed."""
        self._release(clean=False, patient=False)

    def _release(self, clean: bool, patient: bool) -> None:
        attached = list(self._optimizers)
        super()._release(clean, patient)
        self._step_by_bucket(None)
        for optimizer in attached:
            if isinstance(optimizer, AccumAdam):
                optimizer.release_state(self._vectors)
        self._deferred.close()
        if clean:
            self.mixer.close()
        if clean or self.mixer.end(patient):
            self._groups.close()

    def communication_state(self) -> dict[str, Tensor]:
        """Return anchors, outer momenta, and what 8-bit messages have left out so far, one of each per vector.

        The layout of the vectors, which depends on the optimizers attached, is included.
        """
        return with_layout(self._local_state() | numbered("message_error", self.mixer.errors), self._vectors)

    def _local_state(self) -> dict[str, Tensor]:
        return self._local.state if self._local is not None else {}

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`; call it after `load_clock`. Collective: drains first."""
        super().load_communication_state(with_own_layout(state, self._vectors))
        if self._local is not None:
            self._local.loaded()

    def load_clock(self, clock: int) -> None:
        """Continue after `clock` updates. In the middle of a round the communication state must follow. Collective."""
        super().load_clock(clock)
        self._set_rounds()
        for error in self.mixer.errors if clock == 0 else ():
            error.zero_()
        if self._local is not None:
            self._local.require(clock)

    def _set_rounds(self) -> None:
        """Make the mixer continue with the rounds that come after `clock` updates."""
        for fragment in range(self._plan.fragments):
            self.mixer.set_clock(self._plan.merged(self.clock, fragment), fragment)

    def average_(self) -> None:
        """Replace parameters, anchors, outer momenta and buffers by their means, for good. Collective."""
        self._begin("average_()")
        self._drain()
        self._write_mean()
        self.mixer.count_writes()
        mean_over_ranks_(list(self._local_state().values()), *self._replica.peers)

    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2), equal on all ranks. Collective."""
        self._begin("consensus_distance()")
        for vector in self._vectors:
            vector.check("consensus distance")
        weight = self._debiasing.weight(self.clock)
        return consensus_distance(self._flat, *self._replica.peers, weight, everyone=self._groups.world)

    def _mean_state(self) -> list[Tensor]:
        return self._flat + averageable_buffers(self.bare_module)

    def _write_mean(self) -> None:
        self.mixer.wait()  # sends read the vectors in place; what arrived stays valid if they are restored
        self._reshard()
        for vector in self._vectors:
            vector.check("average")
        for vector in self._flat if self._debiasing.needed else ():
            vector.mul_(self._debiasing.weight(self.clock))
        mean_over_ranks_(self._flat, *self._replica.peers)
        average_buffers_(averageable_buffers(self.bare_module), self._groups.world_size, self._groups.world)
