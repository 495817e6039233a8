"""Adam and AdamW whose moments are updated every s steps (arXiv 2410.11998, Algorithm 4, Appendix C).

With small local batches the second moment of Adam has a high variance. Here every step still uses its own gradient on
top of the moments, but what the moments keep is the mean gradient of s steps; see `functional.py` for the recurrence.
With s = 1 it is Adam (AdamW); then prefer `torch.optim`'s.

Differences from the algorithm as printed, following the authors' later notes: the persistent second moment decays with
beta2 (beta1 is printed), and eps stands outside the square root, as in `torch.optim.Adam`. As in the authors' package,
the bias correction counts windows, ceil(k/s) while s stays the same, and an unfinished window carries over epochs and
checkpoints. Unlike there, weight decay never writes into `.grad`, and each parameter counts its own updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from common.arguments import require, require_count, require_decay_rate, require_non_negative
from common.dtensors import count_writes, local, local_parts
from common.flat import Bucket, FlatVector
from common.optim.flat_state import STATE_NAMES, Alone, FlatState, Incoming
from common.optim.foreach import check_keys, chunked, dense_grad, loss_of, scale_
from common.optim.functional import Hyper, update_lists, update_one

OPTIONS = ("lr", "betas", "eps", "weight_decay", "accumulation_steps", "foreach", "fused")


class AccumAdam(Optimizer):
    """Accumulated Adam with coupled (L2) weight decay, as in `torch.optim.Adam`.

    params:             parameters or parameter groups; a group may override every option below
    lr:                 learning rate; may change between steps
    betas:              decay rates of the moments, for each window of s steps. They may change between steps (as
                        OneCycleLR changes them): with s = 1 as in torch's Adam, but a rate that rises from 0 forgets
                        the last gradient; with s > 1 moments have decayed with the rates at the end of their last
                        window
    eps:                added to the square root of the second moment
    weight_decay:       coefficient of the L2 penalty, added to the gradient (not to `.grad`)
    accumulation_steps: s, the steps of a window, whose mean gradient enters the moments. It may change between steps;
                        bias corrections go on from the windows closed so far. Set to 1, it drops what an unfinished
                        window has accumulated; after any other change its gradients keep their weights
    foreach:            False selects the plain loop over parameters, the reference; None and True the fast version
    fused:              True compiles the update into one pass over memory (it needs a C++ compiler, or triton on a
                        GPU); the first steps then take seconds. Attached to a wrapper, gradients are views of a vector:
                        clone one to keep it beyond `zero_grad()`

    A parameter without a gradient is skipped: neither its state nor its count of updates changes. State of each
    parameter: `step` and `windows`, its count of updates and of closed windows (ints), and `exp_avg`, `exp_avg_sq`,
    `accumulator`, of the parameter's shape, dtype and memory layout; no `accumulator` with windows of one step. With
    `fused` these are views of vectors laid out like the parameters. For a DTensor (FSDP2) each rank updates its local
    part, and the state has the same placement.

    Raises ValueError for an argument out of range or a parameter that is complex or not floating-point, and
    RuntimeError in `step` for a gradient that is sparse, or a DTensor placed differently from its parameter.
    """

    arriving: Callable[[], Iterable[tuple[Bucket, Incoming | None]]] | None = None
    _flat: Sequence[FlatState] = ()  # one for each vector of `flatten_state`
    _alone: Mapping[nn.Parameter, FlatState] = MappingProxyType({})  # of fused parameters outside these vectors
    decoupled_weight_decay = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        accumulation_steps: int = 4,
        foreach: bool | None = None,
        fused: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accumulation_steps": accumulation_steps,
            "foreach": foreach,
            "fused": fused,
        }
        self._check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its own options checked like the constructor's."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                self.param_groups.pop()
                raise ValueError(
                    f"{type(self).__name__}: parameter of shape {tuple(param.shape)} has dtype "
                    f"{param.dtype}: expected a real floating-point dtype (torch.view_as_real helps)"
                )

    def init_state(self) -> None:
        """Allocate the missing state of all parameters now (zeros), not at their first gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state_of(param, group | {"fused": False})

    def flatten_state(self, vectors: Sequence[FlatVector], *, place_gradients: bool) -> None:
        """Keep gradients and state of the fused parameters in these vectors in further vectors, laid out alike.

        place_gradients: whether backward itself puts gradients there (see `FlatState`)

        The vectors are reordered by parameter group, so that elements that take the same update are adjacent.
        `step` then updates whole vectors. If all vectors have one owner, it may set `arriving`: `step` then updates the
        buckets that `arriving` yields, in that order. Vectors of another owner end that.
        """
        self.release_state(vectors)
        self.arriving = None
        groups = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for vector in vectors:
            vector.group_by(groups.get)
        placed = groups if place_gradients else ()
        self._flat = [*self._flat, *(FlatState(vector, placed=placed) for vector in vectors)]
        self._alone = {}

    def release_state(self, vectors: Sequence[FlatVector]) -> None:
        """Forget vectors of `flatten_state`: their parameters may move."""
        for flat in self._flat:
            if flat.vector in vectors:
                flat.close()
        self._flat = [flat for flat in self._flat if flat.vector not in vectors]

    def has_flat(self, vectors: Sequence[FlatVector]) -> bool:
        """Return whether these, and no others, are the vectors of `flatten_state`."""
        return [flat.vector for flat in self._flat] == list(vectors)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what `closure` returns, if given."""
        loss = loss_of(closure)
        fused: dict[nn.Parameter, tuple[int, Hyper]] = {}
        for group in self.param_groups:
            params, steps = self._count_updates(group)
            hyper = Hyper.of(group, self.decoupled_weight_decay)
            if group["fused"]:
                fused |= {param: (k, hyper) for param, k in zip(params, steps, strict=True)}
            else:
                self._update(params, steps, hyper, foreach=group["foreach"] is not False)
        for flat in self._flat:
            flat.begin(fused, self.state)
        missing = [param for param in fused if param not in self._alone or not self._alone[param].vector.is_current]
        if missing:
            self._alone = {**self._alone, **{param: FlatState(Alone(param)) for param in missing}}
        for param in list(fused):  # they lie in none of the vectors
            self._alone[param].begin(fused, self.state)
            self._alone[param].update(slice(0, local(param).numel()))
        for bucket, incoming in (self.arriving or self._whole_vectors)():
            self._flat[bucket.vector].update(bucket.span, incoming)
        return loss

    def _whole_vectors(self) -> Iterator[tuple[Bucket, None]]:
        for index, flat in enumerate(self._flat):
            yield Bucket(index, slice(0, flat.vector.data.numel())), None

    def _count_updates(self, group: dict[str, Any]) -> tuple[list[nn.Parameter], list[int]]:
        """Count an update of every parameter of the group that has a gradient; return these and their counts.

        A count is what it would be had s always been the same: s times the closed windows, plus the place in this one.
        """
        s = group["accumulation_steps"]
        self._follow_betas(group)
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            dense_grad(type(self).__name__, param)
        states = [self._state_of(param, group) for param in params]
        counts = []
        for state in states:
            counts.append(state["windows"] * s + state["step"] % s + 1)
            state["step"] += 1
            state["windows"] += counts[-1] % s == 0
        return params, counts

    def _follow_betas(self, group: dict[str, Any]) -> None:
        """With s = 1, make moments, which are stored decayed, decay with these betas instead of the last step's."""
        betas = tuple(group["betas"])
        former = group.setdefault("stored_betas", betas)
        group["stored_betas"] = betas
        if former == betas or group["accumulation_steps"] > 1:
            return
        states = [self.state[param] for param in group["params"] if param in self.state]
        for name, now, before in zip(STATE_NAMES[:2], betas, former, strict=True):
            for moment in (local(state[name]) for state in states if name in state and now != before):
                scale_([moment], now / before if before else 0.0)

    def _update(self, params: list[nn.Parameter], steps: list[int], hyper: Hyper, foreach: bool) -> None:
        """Update parameters, of which `steps` counts the updates, this one included."""
        states = [self.state[param] for param in params]
        lists = [params, [param.grad for param in params]]
        lists += [[state[name] for state in states] for name in state_names(hyper.s)]
        if foreach:
            for k, chunk in chunked(lists, keys=steps):
                update_lists(*chunk, k=k, hyper=hyper)
        else:
            for *tensors, k in zip(*lists, steps, strict=True):
                update_one(*local_parts(tensors), k=k, hyper=hyper)
        count_writes(params)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a state dict; refuse the state of another optimizer."""
        where = type(self).__name__
        for index, group in enumerate(state["param_groups"]):
            check_keys(where, f"parameter group {index}", group, OPTIONS)
            for param_state in (state["state"][param] for param in group["params"] if param in state["state"]):
                # A state with windows is ours: one from windows of one step gets an accumulator at its next gradient.
                s = 1 if "windows" in param_state else group["accumulation_steps"]
                check_keys(where, "the state of a parameter", param_state, ("step", *state_names(s)))
                param_state["step"] = int(param_state["step"])  # a tensor in earlier state dicts, which lack windows
                param_state.setdefault("windows", param_state["step"] // group["accumulation_steps"])
        super().__setstate__(state)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of `param`; missing tensors are made of zeros, unused ones are dropped."""
        state = self.state[param]
        if not state:
            state["step"] = state["windows"] = 0
        names = state_names(group["accumulation_steps"])
        for name in names:
            if name not in state and not group["fused"]:  # else FlatState has a place for it
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if "accumulator" not in names:
            state.pop("accumulator", None)
        return state

    def _check_options(self, options: dict[str, Any]) -> None:
        where = type(self).__name__
        for name in ("lr", "eps", "weight_decay"):
            require_non_negative(where, name, options[name])
        betas = options["betas"]
        require(isinstance(betas, Sequence) and len(betas) == 2, where, "betas", betas, "two numbers in [0, 1)")
        for i, beta in enumerate(betas):
            require_decay_rate(where, f"betas[{i}]", beta)
        require_count(where, "accumulation_steps", options["accumulation_steps"], at_least=1)
        foreach = options["foreach"]
        require(foreach is None or isinstance(foreach, bool), where, "foreach", foreach, "a bool or None")
        fused = options["fused"]
        require(isinstance(fused, bool), where, "fused", fused, "a bool")
        require(not (fused and foreach is not None), where, "fused", fused, f"False with foreach={foreach}")


class AccumAdamW(AccumAdam):
    """Accumulated Adam with decoupled weight decay, x <- (1 - lr weight_decay) x before the update, as AdamW.

    Arguments, state and errors are those of `AccumAdam`.
    """

    decoupled_weight_decay = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        accumulation_steps: int = 4,
        foreach: bool | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, accumulation_steps=accumulation_steps, foreach=foreach, fused=fused
        )


def state_names(accumulation_steps: int) -> tuple[str, ...]:
    """Return the names of the tensors in a parameter's state, which have its shape."""
    return STATE_NAMES if accumulation_steps > 1 else STATE_NAMES[:2]
