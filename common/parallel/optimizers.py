"""What the engine needs for optimizers that do more than update.

They step bucket by bucket, have their momentum mixed, or see what mixing did to the parameters.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.dtensors import local, placed_as
from common.flat import FlatVector
from common.optim import AccumAdam, DmSGD, QGDmSGD
from common.options import LocalSteps
from common.topology import Topology


def is_bucketwise(optimizer: Optimizer) -> TypeGuard[AccumAdam]:
    """Return whether the optimizer can merge and update one bucket at a time: a fused AccumAdam(W)."""
    return isinstance(optimizer, AccumAdam) and all(group["fused"] for group in optimizer.param_groups)


def check_layout_is_free(clock: int, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a fused optimizer comes after updates whose communication state has the old layout."""
    if clock and state:
        raise ValueError(
            f"attach: a fused optimizer after {clock} updates: expected before the first one: it lays parameters out "
            "anew, but not anchors nor errors of messages"
        )


def warn_of_window(optimizer: Optimizer, plan: LocalSteps) -> None:
    """Warn about AccumAdam windows as long as the rounds of local steps: small language models diverged with them."""
    groups = optimizer.param_groups if isinstance(optimizer, AccumAdam) else ()
    if plan.steps > 1 and any(group["accumulation_steps"] == plan.steps for group in groups):
        warnings.warn(
            f"accumulation_steps={plan.steps} with local_steps={plan.steps}: windows as long as rounds diverged; take "
            "shorter ones",
            stacklevel=3,
        )


def warn_of_clock(optimizers: Sequence[Optimizer]) -> None:
    """Warn about a resume without `load_clock`: its rounds would differ from those of an uninterrupted run."""
    values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    if any(local(value).any() for value in values if isinstance(value, Tensor)):
        warnings.warn(
            "the optimizer has made updates before, but model.clock is 0: to continue a run, call "
            "model.load_clock(updates) on every rank after load_state_dict()",
            stacklevel=2,
        )


class OutsideParameters:
    """Warns once about a parameter of the module that each worker trains on its own.

    said: whether there is nothing left to warn about
    """

    def __init__(self, said: bool) -> None:
        self.said = said
        self._held = 0  # parameters of the attached optimizers
        self._named: list[tuple[str, nn.Parameter]] = []  # the module's among these that workers do not share

    def look(self, module: nn.Module, optimizers: Sequence[Optimizer], common: Collection[nn.Parameter]) -> None:
        """Warn if a trained parameter that is not in `common` has a gradient."""
        if self.said:
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = sum(len(group["params"]) for group in groups)
        if held != self._held:
            trained = {p for group in groups for p in group["params"]}.difference(common)
            self._held, self._named = held, [(name, p) for name, p in module.named_parameters() if p in trained]
        for name, parameter in self._named:
            if parameter.grad is not None:
                warnings.warn(
                    f"parameter '{name}' is trained, but was frozen or missing when the module was wrapped: each "
                    "worker, or rank of it, trains it for itself, and averages leave it out. To train it together, "
                    "call close(), make it trainable, and wrap and attach again",
                    stacklevel=4,
                )
                self.said = True
                return


class LateBackward:
    """Refuses a backward between the steps of an update: the first step has mixed these parameters."""

    def __init__(self, mixed: Collection[nn.Parameter]) -> None:
        self._mixed = mixed
        self._without: list[nn.Parameter] = []  # a gradient at the first step of this update

    def look(self, first: bool) -> None:
        """Note, before the first step, what has no gradient; raise RuntimeError if it has one before a later step."""
        if first:
            self._without = [parameter for parameter in self._mixed if parameter.grad is None]
        elif any(parameter.grad is not None for parameter in self._without):
            raise RuntimeError(
                "a backward after the first optimizer.step() of an update, which mixes all parameters with order='awc':"
                " expected every backward before that step, order='atc', or a wrapper for each optimizer"
            )


class Deferred:
    """A worker's optimizers whose steps its wrapper finishes: DmSGD with momentum mixing, and QGDmSGD.

    momentum: the momentum of each DmSGD, to be mixed before the parameters

    With a single worker nothing is mixed, and they are ordinary optimizers.
    """

    def __init__(self, topology: Topology, plan: LocalSteps, vectors: Sequence[FlatVector]) -> None:
        self._topology, self._plan, self._vectors = topology, plan, vectors
        self.momentum: list[MomentumVectors] = []
        self._tracking: list[QGDmSGD] = []

    def name_of(self, optimizer: Optimizer) -> str | None:
        """Return the name, for messages, of an optimizer that belongs here; None for any other.

        Raises ValueError if it is attached already, or with an order other than "atc", local steps, or a topology
        that needs push-sum.
        """
        if isinstance(optimizer, QGDmSGD):
            name, instead = "QGDmSGD", "DmSGD(momentum_mixing=False)"
        elif isinstance(optimizer, DmSGD) and optimizer.momentum_mixing:
            name, instead = "DmSGD(momentum_mixing=True)", "momentum_mixing=False"
        else:
            return None
        plan, topology = self._plan, self._topology
        if topology.world_size == 1:
            return None
        if plan.order != "atc":
            raise ValueError(f"{name} needs order='atc', got order={plan.order!r}")
        if not plan.every_update:
            raise ValueError(
                f"{name} is defined for a round in every update without an outer step, got local_steps={plan.steps}, "
                f"outer.lr={plan.outer.lr:g}, outer.momentum={plan.outer.momentum:g}: use {instead}"
            )
        if not topology.doubly_stochastic:
            raise ValueError(f"{name} is defined for doubly stochastic topologies, got {topology.name}: use {instead}")
        if optimizer.deferred:
            raise ValueError(
                f"attach: this {name} is attached already, and its wrapper finishes each step after mixing: expected "
                "an optimizer for each wrapper, or one wrapper around all modules (close() a former wrapper first)"
            )
        return name

    def add(self, optimizer: DmSGD | QGDmSGD) -> None:
        """Finish the steps of this optimizer from now on."""
        if isinstance(optimizer, DmSGD):
            self.momentum.append(MomentumVectors(optimizer, self._vectors))
        else:
            optimizer.deferred = True
            self._tracking.append(optimizer)

    def track(self) -> None:
        """Finish the steps of QGDmSGD, after the parameters were mixed."""
        for optimizer in self._tracking:
            optimizer.track()

    def close(self) -> None:
        """Let the optimizers take whole steps again."""
        for optimizer in (*(momentum.optimizer for momentum in self.momentum), *self._tracking):
            optimizer.deferred = False
        self.momentum.clear()
        self._tracking.clear()


class MomentumVectors:
    """The momentum of one DmSGD in vectors laid out like the parameters.

    From now on its `step()` only accumulates; the owner mixes `flat()` and calls its `descend()`.
    """

    def __init__(self, optimizer: DmSGD, vectors: Sequence[FlatVector]) -> None:
        self.optimizer = optimizer
        self._vectors = vectors
        self._flat = [torch.zeros_like(vector.data) for vector in vectors]
        self._slots = [vector.slots for vector in vectors]
        optimizer.init_state()
        optimizer.deferred = True

    def flat(self) -> list[Tensor]:
        """Return the momentum as 1-D tensors, one for each flat vector; padding and others' parameters are 0.

        Loading the optimizer's state replaces its tensors: the new ones are moved into the vectors again. The same
        happens to all momentum of a parameter vector that was laid out anew.
        """
        for index, vector in enumerate(self._vectors):
            if vector.slots is not self._slots[index]:
                self._flat[index], self._slots[index] = torch.zeros_like(vector.data), vector.slots
        for vector, flat in zip(self._vectors, self._flat, strict=True):
            for view, parameter in zip(vector.views_of(flat), vector.parameters, strict=True):
                state = self.optimizer.state.get(parameter)
                if not state:
                    continue
                momentum = local(state["momentum_buffer"])
                if momentum.data_ptr() != view.data_ptr():
                    state["momentum_buffer"] = placed_as(parameter, view.copy_(momentum))
        return self._flat
