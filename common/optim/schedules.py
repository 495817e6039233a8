"""Learning-rate schedules of the papers, as factors for `LambdaLR` in units of optimizer updates.

After `scheduler = LambdaLR(optimizer, Cosine(total_steps=...))`, call `scheduler.step()` after each committed update
(never after one that a gradient scaler has skipped). Update number t = 0, 1, ... then uses (base lr of the group) x
factor(t). All schedules begin with a linear warm-up,

    factor(t) = warmup_start + (1 - warmup_start) t / warmup_steps      for t < warmup_steps,

and reach exactly the base lr at t = warmup_steps. The factors are small dataclasses of plain numbers, so a scheduler
can be pickled, and its `state_dict` holds them: a resumed run continues the schedule that it began with. Arguments out
of range raise ValueError.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from common.arguments import require, require_count, require_fraction


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Factor 1 after a linear warm-up; the base of the other schedules."""

    warmup_steps: int = 0
    warmup_start: float = 0.0

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

    As in nanoGPT and torch's CosineAnnealingLR, the last of `total_steps` updates is just above the final value.
    The factor changes only every `hold` updates after the warm-up: if those are an epoch's, once per epoch.
    """

    total_steps: int
    final_fraction: float = 0.0
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
    """sqrt(warmup_steps / t) after the warm-up, with updates counted from `first`: update 0 has t = first.

    first: 0 as in fairseq's `inverse_sqrt`, 1 as in the code of arXiv 2410.11998
    """

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
    gamma: float = 0.1

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
