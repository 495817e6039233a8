"""Learning-rate schedules of the papers, as `LambdaLR` in units of optimizer updates.

Call `scheduler.step()` after each committed update (never after one that a gradient scaler has skipped).
Update number t = 0, 1, ... then uses (base lr of the group) x factor(t). All schedules begin with a linear
warm-up,

    factor(t) = warmup_start + (1 - warmup_start) t / warmup_steps      for t < warmup_steps,

and reach exactly the base lr at t = warmup_steps. The factors are small dataclasses of plain numbers, so a
scheduler can be pickled, and its `state_dict` holds them: a resumed run continues the schedule that it
began with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.arguments import require, require_count, require_fraction, require_non_negative


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Factor 1 after a linear warm-up; the base of the other schedules."""

    warmup_steps: int
    warmup_start: float

    def __post_init__(self) -> None:
        require_count(self._name, "warmup_steps", self.warmup_steps, at_least=0)
        require_fraction(self._name, "warmup_start", self.warmup_start)

    def __call__(self, t: int) -> float:
        """Return the factor of update `t`, counted from 0."""
        if t < self.warmup_steps:
            return self.warmup_start + (1 - self.warmup_start) * t / self.warmup_steps
        return self.after_warmup(t)

    def after_warmup(self, t: int) -> float:
        """Return the factor of update `t >= warmup_steps`."""
        return 1.0

    @property
    def _name(self) -> str:
        return f"schedule {type(self).__name__}"


@dataclass(frozen=True, kw_only=True)
class Cosine(Constant):
    """Half a cosine from 1 at t = warmup_steps to `final_fraction` at t = total_steps and after.

    The factor changes only every `hold` updates after the warm-up: if those are an epoch's, once per epoch.
    """

    total_steps: int
    final_fraction: float
    hold: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self._name, "total_steps", self.total_steps, at_least=1)
        expected = f"fewer than total_steps={self.total_steps}"
        require(self.warmup_steps < self.total_steps, self._name, "warmup_steps", self.warmup_steps, expected)
        require_fraction(self._name, "final_fraction", self.final_fraction)
        require_count(self._name, "hold", self.hold, at_least=1)

    def after_warmup(self, t: int) -> float:
        """Return the factor of update `t >= warmup_steps`."""
        if t >= self.total_steps:
            return self.final_fraction
        updates = (t - self.warmup_steps) // self.hold * self.hold
        progress = updates / (self.total_steps - self.warmup_steps)
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(Constant):
    """sqrt(warmup_steps / t) after the warm-up, with updates counted from `first`: update 0 has t = first."""

    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self._name, "warmup_steps", self.warmup_steps, at_least=1)
        require_count(self._name, "first", self.first, at_least=0)

    def __call__(self, t: int) -> float:
        """Return the factor of update `t`, counted from 0."""
        return super().__call__(t + self.first)

    def after_warmup(self, t: int) -> float:
        """Return the factor of update `t >= warmup_steps`."""
        return math.sqrt(self.warmup_steps / t)


@dataclass(frozen=True, kw_only=True)
class MultiStep(Constant):
    """gamma ** (number of milestones <= t) after the warm-up."""

    milestones: tuple[int, ...]
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, milestone in enumerate(self.milestones):
            require_count(self._name, f"milestones[{i}]", milestone, at_least=max(1, self.warmup_steps))
        increasing = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        require(increasing, self._name, "milestones", self.milestones, "strictly increasing steps")
        require_fraction(self._name, "gamma", self.gamma)

    def after_warmup(self, t: int) -> float:
        """Return the factor of update `t >= warmup_steps`."""
        return self.gamma ** bisect_right(self.milestones, t)


def constant_with_warmup(optimizer: Optimizer, warmup_steps: int = 0, warmup_start: float = 0.0) -> LambdaLR:
    """Return a schedule of linear warm-up from `warmup_start` x the base lr, then the base lr."""
    return LambdaLR(optimizer, Constant(warmup_steps=warmup_steps, warmup_start=warmup_start))


def cosine_with_warmup(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_start: float = 0.0,
    *,
    final_lr: float | None = None,
    final_fraction: float | None = None,
    hold: int = 1,
) -> LambdaLR:
    """Return linear warm-up, then half a cosine to `final_lr` or to `final_fraction` x the base lr (default 0).

    The final value belongs to t = total_steps, as in nanoGPT and torch's CosineAnnealingLR: the last of
    `total_steps` updates, t = total_steps - 1, uses a value just above it. `final_lr` is the same for all
    parameter groups, whatever their base lr. After the warm-up lr changes only every `hold` updates. Raises ValueError
    for arguments out of range.
    """
    where = "cosine_with_warmup"
    if final_lr is None:
        fractions = [0.0 if final_fraction is None else final_fraction] * len(optimizer.param_groups)
    else:
        require(final_fraction is None, where, "final_fraction", final_fraction, "None when final_lr is given")
        require_non_negative(where, "final_lr", final_lr)
        base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        for i, base_lr in enumerate(base_lrs):
            expected = f"at most the lr of parameter group {i}, {base_lr}, which must be > 0"
            require(base_lr > 0 and final_lr <= base_lr, where, "final_lr", final_lr, expected)
        fractions = [final_lr / base_lr for base_lr in base_lrs]
    return LambdaLR(
        optimizer,
        [
            Cosine(
                warmup_steps=warmup_steps,
                warmup_start=warmup_start,
                total_steps=total_steps,
                final_fraction=fraction,
                hold=hold,
            )
            for fraction in fractions
        ],
    )


def inverse_square_root(
    optimizer: Optimizer, warmup_steps: int, warmup_start: float = 0.0, *, first: int = 0
) -> LambdaLR:
    """Return linear warm-up, then the base lr x sqrt(warmup_steps / t), like fairseq's `inverse_sqrt`.

    The first update has t = `first`: 0 as in fairseq, 1 as in the code of arXiv 2410.11998. Raises ValueError for
    arguments out of range; `warmup_steps` must be at least 1.
    """
    return LambdaLR(optimizer, InverseSquareRoot(warmup_steps=warmup_steps, warmup_start=warmup_start, first=first))


def multistep_with_warmup(
    optimizer: Optimizer,
    milestones: Sequence[int],
    gamma: float = 0.1,
    warmup_steps: int = 0,
    warmup_start: float = 0.0,
) -> LambdaLR:
    """Return linear warm-up, then a factor `gamma` from each milestone on (from update t = milestone).

    Milestones are update numbers, strictly increasing, none before the end of the warm-up (else ValueError).
    """
    expected = "a list of update numbers"
    require(isinstance(milestones, list | tuple), "multistep_with_warmup", "milestones", milestones, expected)
    return LambdaLR(
        optimizer,
        MultiStep(warmup_steps=warmup_steps, warmup_start=warmup_start, milestones=tuple(milestones), gamma=gamma),
    )
