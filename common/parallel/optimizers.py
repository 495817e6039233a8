"""What the engine asks of optimizers that do more than update.

To go bucket by bucket, to have momentum mixed, or to see what mixing did to the parameters.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.dtensors import local, placed_as
from common.flat import Bucket, FlatVector
from common.local_steps import LocalSteps
from common.optim import AccumAdam, DmSGD, QGDmSGD
from common.optim.flat_state import Incoming
from common.topology import Topology


class BucketwiseOptimizer(Protocol):
    """An optimizer that can merge and update one bucket of the flat vectors at a time.

    arriving: if set, its `step()` calls this once and `update`s every bucket it yields, in this order; a
              `flatten_state` for further vectors unsets it
    """

    arriving: Callable[[], Iterable[tuple[Bucket, Incoming | None]]] | None

    def flatten_state(self, vectors: Sequence[FlatVector], *, place_gradients: bool) -> None:
        """Keep gradients and state in vectors laid out as these."""

    def release_state(self, vectors: Sequence[FlatVector]) -> None:
        """Forget vectors of `flatten_state`."""

    def has_flat(self, vectors: Sequence[FlatVector]) -> bool:
        """Return whether these are all vectors of `flatten_state`."""

    def update(self, bucket: Bucket, incoming: Incoming | None) -> None:
        """Merge `incoming`, if given, into the bucket, then update it."""


def is_bucketwise(optimizer: Optimizer) -> TypeGuard[BucketwiseOptimizer]:
    """Return whether the optimizer can go bucket by bucket: a fused AccumAdam(W)."""
    return isinstance(optimizer, AccumAdam) and all(group["fused"] for group in optimizer.param_groups)


def check_layout_is_free(clock: int, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a fused optimizer comes after updates that left a communication state in the old layout."""
    if clock and state:
        raise ValueError(
            f"attach: a fused optimizer after {clock} updates: expected before the first one: it lays parameters out "
            "anew, but not anchors nor errors of messages"
        )


def warn_of_window(optimizer: Optimizer, plan: LocalSteps) -> None:
    """Warn of windows of AccumAdam that end with the rounds of local steps: small language models diverged."""
    groups = optimizer.param_groups if isinstance(optimizer, AccumAdam) else ()
    if plan.steps > 1 and any(group["accumulation_steps"] == plan.steps for group in groups):
        warnings.warn(
            f"accumulation_steps={plan.steps} with local_steps={plan.steps}: windows as long as rounds diverged; take "
            "shorter ones",
            stacklevel=3,
        )


def mixes_momentum(optimizer: Optimizer, order: str, topology: Topology, plan: LocalSteps) -> bool:
    """Return whether the momentum of `optimizer` travels too.

    Raises ValueError for DmSGD(momentum_mixing=True) in another order than "atc", with local steps, or with a topology
    that needs push-sum, and for one that is attached already.
    """
    if not (isinstance(optimizer, DmSGD) and optimizer.momentum_mixing and topology.world_size > 1):
        return False
    _require_definition("DmSGD(momentum_mixing=True)", order, topology, plan, "momentum_mixing=False")
    _require_unattached("DmSGD(momentum_mixing=True)", optimizer)
    return True


def tracks_mixing(optimizer: Optimizer, order: str, topology: Topology, plan: LocalSteps) -> TypeGuard[QGDmSGD]:
    """Return whether `optimizer` needs a call of `track()` after the parameters were mixed.

    Raises ValueError for QGDmSGD in another order than "atc", with local steps, or with a topology that needs push-sum,
    and for one that is attached already.
    """
    if not isinstance(optimizer, QGDmSGD) or topology.world_size == 1:
        return False
    _require_definition("QGDmSGD", order, topology, plan, "DmSGD(momentum_mixing=False)")
    _require_unattached("QGDmSGD", optimizer)
    return True


def _require_unattached(name: str, optimizer: DmSGD | QGDmSGD) -> None:
    if optimizer.deferred:
        raise ValueError(
            f"attach: this {name} is attached already, and its wrapper finishes each step after mixing: expected an "
            "optimizer for each wrapper, or one wrapper around all modules (close() a former wrapper first)"
        )


def _require_definition(optimizer: str, order: str, topology: Topology, plan: LocalSteps, instead: str) -> None:
    if order != "atc":
        raise ValueError(f"{optimizer} needs order='atc', got order={order!r}")
    if not plan.every_update:
        raise ValueError(
            f"{optimizer} is defined for a round in every update without an outer step, got "
            f"local_steps={plan.steps}, outer.lr={plan.outer.lr:g}, outer.momentum={plan.outer.momentum:g}: use "
            f"{instead}"
        )
    if not topology.doubly_stochastic:
        raise ValueError(f"{optimizer} is defined for doubly stochastic topologies, got {topology.name}: use {instead}")


class MomentumVectors:
    """The momentum of one DmSGD in vectors laid out as the parameters.

    From now on the optimizer's `step()` only accumulates; the owner mixes `flat()` and calls `descend()`.
    """

    def __init__(self, optimizer: DmSGD, vectors: Sequence[FlatVector]) -> None:
        self.optimizer = optimizer
        self._vectors = vectors
        self._flat = [torch.zeros_like(vector.data) for vector in vectors]
        self._slots = [vector.slots for vector in vectors]
        self._moving: list[tuple[list[Tensor], float]] = []
        optimizer.init_state()
        optimizer.deferred = True
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._remember())

    def close(self) -> None:
        """Give the whole step back to the optimizer."""
        self._handle.remove()
        self.optimizer.deferred = False

    def _remember(self) -> None:
        # What this step moves, and how far: until the last optimizer (or simulated worker) has stepped, the user may
        # call this one's zero_grad() and its schedule.
        self._moving = [
            (moved, group["lr"])
            for group in self.optimizer.param_groups
            if (moved := [p for p in group["params"] if p.grad is not None])
        ]

    @torch.no_grad()
    def descend(self) -> None:
        """Compute x <- x - lr m where there was a gradient in this step: the second half of DmSGD's step."""
        for parameters, lr in self._moving:
            momenta = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
            torch._foreach_add_(parameters, momenta, alpha=-lr)

    def flat(self) -> list[Tensor]:
        """Return the momentum as 1-D tensors, one for each flat vector; padding and foreign parameters are 0.

        Loading the optimizer's state replaces its tensors: the new ones are moved into the vectors again. So are all
        when a parameter vector was laid out anew.
        """
        for index, vector in enumerate(self._vectors):
            if vector.slots is not self._slots[index]:
                self._flat[index], self._slots[index] = torch.zeros_like(vector.data), vector.slots
        for vector, flat in zip(self._vectors, self._flat, strict=True):
            for slot, parameter in zip(vector.slots, vector.parameters, strict=True):
                state = self.optimizer.state.get(parameter)
                if not state:
                    continue
                view = flat.as_strided(slot.size, slot.stride, flat.storage_offset() + slot.offset)
                momentum = local(state["momentum_buffer"])
                if momentum.data_ptr() != view.data_ptr():
                    state["momentum_buffer"] = placed_as(parameter, view.copy_(momentum))
        return self._flat
