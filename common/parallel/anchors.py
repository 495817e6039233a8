"""The outer parameters and the outer momentum of local steps: memory and arithmetic, for one or stacked workers.

Inner steps do not change an anchor, so sends can read it in place meanwhile, and what is in flight is a function of
anchors and clock: a checkpoint need not contain messages.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from common.flat import Bucket, FlatVector
from common.options import LocalSteps, Outer


class Anchors:
    """Outer parameters a and outer momenta v, laid out like the parameters x.

    a is not allocated if it would always equal x, nor v if the momentum is 0.

    parameters: x, 1-D or stacked [N, P]; everything is kept and computed in their dtype and on their device
    fragments:  the slices of each fragment, along the last dimension; to be set before first use
    """

    def __init__(self, plan: LocalSteps, parameters: Sequence[Tensor]) -> None:
        self._plan, self._parameters = plan, parameters
        self.fragments: Sequence[Sequence[Bucket]] = ()
        self.anchors = [x.clone() for x in parameters] if plan.keeps_anchors else []
        self.momenta = [torch.zeros_like(x) for x in parameters] if plan.outer.momentum else []
        self._current = False  # whether anchors of rounds that begin are known to equal the parameters
        self._missing = ""  # what has to be loaded before the next update
        self._fresh: set[int] = set()  # workers whose anchors were loaded after the last update
        self._overwritten: set[int] = set()  # workers among these whose parameters were loaded after the anchors

    @property
    def state(self) -> dict[str, Tensor]:
        """Anchors and momenta, by name: what the next rounds depend on besides parameters and clock."""
        return numbered("anchor", self.anchors) | numbered("outer_momentum", self.momenta)

    def expire(self) -> None:
        """Expect writes to the parameters: rounds that begin next start from the new values."""
        self._current = False

    def require(self, clock: int) -> None:
        """Expect `state` to be loaded, unless anchors are the parameters and momenta are zero after `clock` updates."""
        for momentum in self.momenta if clock <= self._plan.start else ():
            momentum.zero_()
        inside = bool(self.anchors) and len(self._plan.beginning(clock)) < self._plan.fragments
        moved = bool(self.momenta) and clock > self._plan.start
        self._missing = " and ".join(["anchors"] * inside + ["outer momenta"] * moved)
        self._current = False

    def loaded(self, worker: int = 0) -> None:
        """Note that `state` was loaded."""
        self._missing = ""
        self._fresh.add(worker)
        self._overwritten.discard(worker)

    def overwrite(self, clock: int, worker: int = 0) -> None:
        """Note that parameters were loaded: within a round, anchors loaded before them must be loaded again."""
        if worker in self._fresh and self.anchors and len(self._plan.beginning(clock)) < self._plan.fragments:
            self._overwritten.add(worker)

    def prepare(self, clock: int) -> None:
        """Copy the parameters to the anchors of rounds that begin after `clock` updates, unless that was done.

        Raises RuntimeError if anchors or momenta that `require` or `overwrite` expects were not loaded.
        """
        if self._current:
            return
        if missing := self._missing or ("anchors" if self._overwritten else ""):
            raise RuntimeError(
                f"clock={clock} with local_steps={self._plan.steps}: {missing} of the round are missing: call "
                "load_communication_state(...) after load_clock(...) and load_state_dict(...)"
            )
        self._fresh.clear()
        self._copy_parameters(self._plan.beginning(clock))
        self._current = True

    def reset(self) -> None:
        """Copy the parameters to all anchors: rounds in progress continue from there."""
        self._copy_parameters(range(self._plan.fragments))

    def launch(self, clock: int, launch: Callable[..., None]) -> None:
        """Launch what travels after `clock` updates.

        launch: called with a fragment, and whether parameters may be written before its merge
        """
        self.prepare(clock)
        # Parameters that are merged before the next update must not be written until then: x <- a would lose the write.
        writable = self._plan.sends_anchors and not self._plan.merges_at_beginning(clock)
        for fragment in self._plan.launched(clock):
            launch(fragment, writable=writable)

    def merge(self, clock: int, mix: Callable[[int, Sequence[Tensor]], None]) -> None:
        """Merge what is due before update number `clock`.

        mix: called with a fragment and the tensors, laid out like the anchors, to add the change by mixing to
        """
        self.prepare(clock)
        for fragment in self._plan.merging(clock):
            equal = not self.anchors or self._plan.merges_at_beginning(clock)  # x equals a
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
        """Compute d = x - a; v <- mu v + d; a <- a + eta (d + mu v), rounding as torch.optim.SGD does; overwrite x."""
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
        """Return (x, a, v) of each slice of a fragment; [] without anchors, where x is a and there is no outer step."""
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


def with_layout(state: dict[str, Tensor], vectors: Sequence[FlatVector]) -> dict[str, Tensor]:
    """Return a state of 1-D tensors, laid out like these vectors, with their layout added; an empty one as is."""
    return state | numbered("layout", [_layout(vector) for vector in vectors]) if state else state


def with_own_layout(state: Mapping[str, Tensor], vectors: Sequence[FlatVector]) -> dict[str, Tensor]:
    """Return a state that was saved `with_layout`, rearranged to the layout of these vectors.

    A state without a layout, from an earlier checkpoint, is assumed to have this one. Raises ValueError for parameters
    with other names or shapes.
    """
    result = with_layout(dict(state), vectors) | dict(state)
    for index, vector in enumerate(vectors):
        name = f"layout.{index}"
        if name not in state or (theirs := _places(state[name])) == (ours := _places(_layout(vector))):
            continue
        if [(key, size) for key, size, _, _ in theirs] != [(key, size) for key, size, _, _ in ours]:
            names = ", ".join(slot.name for slot in vector.slots)
            raise ValueError(f"communication state: {name}: expected that of {names}; got other names or shapes")
        result[name] = _layout(vector)
        for kept in (kept for kept in state if kept.endswith(f".{index}") and kept != name):
            result[kept] = moved = torch.zeros_like(state[kept])
            for (_, size, offset, stride), (_, _, own_offset, own_stride) in zip(theirs, ours, strict=True):
                values = state[kept].as_strided(size, stride, state[kept].storage_offset() + offset)
                moved.as_strided(size, own_stride, own_offset).copy_(values)
    return result


def _layout(vector: FlatVector) -> Tensor:
    """Return where each parameter lies, as a vector of integers, sorted by the parameters' names."""
    rows = (
        (zlib.crc32(slot.name.encode()), len(slot.size), *slot.size, slot.offset, *slot.stride)
        for slot in sorted(vector.slots, key=lambda slot: slot.name)
    )
    return torch.tensor([number for row in rows for number in row], dtype=torch.int64)


def _places(layout: Tensor) -> list[tuple[int, tuple[int, ...], int, tuple[int, ...]]]:
    """Return (hash of the name, size, offset, stride) for each parameter."""
    numbers, places = iter(layout.tolist()), []
    for key in numbers:
        size = tuple(islice(numbers, next(numbers)))
        places.append((key, size, next(numbers), tuple(islice(numbers, len(size)))))
    return places
