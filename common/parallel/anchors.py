"""The outer parameters and the outer momentum of local steps: memory and arithmetic, of one worker or of stacked ones.

Inner steps do not change an anchor, so sends read it in place while they go on, and what is in flight is a function of
anchors and clock: a checkpoint needs no message.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from common.flat import Bucket
from common.local_steps import LocalSteps, Outer


class Anchors:
    """Anchors a and momenta v, laid out as the parameters x; all empty where they would equal x, or v is not used.

    parameters: x, 1-D or stacked [N, P]; in their dtype and on their device all is kept and computed
    fragments:  the slices of each fragment, along the last dimension; to be set before first use
    """

    def __init__(self, plan: LocalSteps, parameters: Sequence[Tensor]) -> None:
        self._plan, self._parameters = plan, parameters
        self.fragments: Sequence[Sequence[Bucket]] = ()
        self.anchors = [x.clone() for x in parameters] if plan.keeps_anchors else []
        self.momenta = [torch.zeros_like(x) for x in parameters] if plan.outer.momentum else []
        self._current = False  # whether anchors of rounds that begin are known to be the parameters
        self._missing = ""  # what has to be loaded before the next update

    @property
    def state(self) -> dict[str, Tensor]:
        """Anchors and momenta, by name: what the next rounds depend on besides parameters and clock."""
        return numbered("anchor", self.anchors) | numbered("outer_momentum", self.momenta)

    def expire(self) -> None:
        """Expect the parameters to be written: rounds that begin then begin from what was written."""
        self._current = False

    def require(self, clock: int) -> None:
        """Expect `state` to be loaded, unless after `clock` updates anchors are the parameters and momenta are zero."""
        inside = bool(self.anchors) and len(self._plan.beginning(clock)) < self._plan.fragments
        moved = bool(self.momenta) and clock > self._plan.start
        self._missing = " and ".join(["anchors"] * inside + ["outer momenta"] * moved)
        self._current = False

    def loaded(self) -> None:
        """Note that `state` was loaded."""
        self._missing = ""

    def prepare(self, clock: int) -> None:
        """Make anchors of rounds that begin after `clock` updates the parameters, unless they are.

        Raises RuntimeError after a resume without what `require` expects.
        """
        if self._current:
            return
        if self._missing:
            raise RuntimeError(
                f"clock={clock} with local_steps={self._plan.steps}: {self._missing} of the round are missing: call "
                "load_communication_state(...) after load_clock(...)"
            )
        self._copy_parameters(self._plan.beginning(clock))
        self._current = True

    def reset(self) -> None:
        """Make all anchors the parameters: rounds in progress go on from there."""
        self._copy_parameters(range(self._plan.fragments))

    def merge(self, clock: int, mix: Callable[[int, Sequence[Tensor]], None]) -> None:
        """Merge what is due before update number `clock`.

        mix: called with a fragment and the tensors, laid out as the anchors, that move as far as these do when mixed
        """
        for fragment in self._plan.merging(clock):
            equal = not self.anchors or self._plan.merges_at_beginning(clock)  # x is a
            mix(fragment, [] if equal else self._parameters)
            if equal:
                self._return(fragment)

    def end(self, clock: int, mix: Callable[[int, Sequence[Tensor]], None]) -> None:
        """End the rounds that end with update number `clock`: take the outer step, and mix where nothing travels."""
        plan, outer = self._plan, self._plan.outer_of(clock)
        for fragment in plan.ending(clock):
            if plan.merge_after == 0 and not plan.sends_anchors:
                mix(fragment, [])
            self._step(fragment, outer)
            if plan.merge_after == 0 and plan.sends_anchors:
                mix(fragment, [])
            self._return(fragment)

    @torch.no_grad()
    def _copy_parameters(self, fragments: Iterable[int]) -> None:
        """Compute a <- x."""
        for fragment in fragments:
            for x, a, _ in self._slices(fragment):
                a.copy_(x)

    @torch.no_grad()
    def _return(self, fragment: int) -> None:
        """Compute x <- a."""
        for x, a, _ in self._slices(fragment):
            x.copy_(a)

    @torch.no_grad()
    def _step(self, fragment: int, outer: Outer) -> None:
        """Compute d = x - a; v <- mu v + d; a <- a + eta (d + mu v), rounded as torch.optim.SGD does; overwrite x."""
        for x, a, v in self._slices(fragment):
            if outer.is_identity:
                a.copy_(x)
                continue
            direction = x.sub_(a)
            if v is not None:
                v.mul_(outer.momentum).add_(direction)
                direction = direction.add_(v, alpha=outer.momentum) if outer.nesterov else v
            a.add_(direction, alpha=outer.lr)

    def _slices(self, fragment: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return (x, a, v) of each slice of a fragment; none without anchors: x is a, and there is no outer step."""
        if not self.anchors:
            return []
        return [
            (
                self._parameters[part.vector][..., part.span],
                self.anchors[part.vector][..., part.span],
                self.momenta[part.vector][..., part.span] if self.momenta else None,
            )
            for part in self.fragments[fragment]
        ]


def numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return tensors as "name.0", "name.1" and so on."""
    return {f"{name}.{index}": tensor for index, tensor in enumerate(tensors)}
