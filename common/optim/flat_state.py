"""Gradients and state of accumulated Adam in vectors laid out like the parameters: a bucket takes one kernel call."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.dtensors import local, local_parts, placed_as
from common.flat import FlatVector, layout
from common.optim.compiled import Vectors, merge_, update_compiled
from common.optim.functional import Hyper

STATE_NAMES = ("exp_avg", "exp_avg_sq", "accumulator")  # the last one only where a window has several steps
KEPT_SPANS = 4096  # per vector; if gradients come and go at random, there are ever new ones


class Incoming(NamedTuple):
    """What peers sent for a bucket x [N]: merging it is x <- own x + weight tensor; tensor [N]."""

    tensor: Tensor
    own: float
    weight: float


class Alone:
    """A parameter outside all flat vectors, treated as a one-parameter vector; its memory is not moved.

    For a DTensor this is the local part. Raises ValueError for a parameter with gaps between its elements.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = [parameter]
        part = local(parameter)
        self._kind = (part.dtype, part.device, part.stride())
        self.slots, _ = layout([("", part)])
        if not part.is_contiguous() and part.stride() != self.slots[0].stride:
            raise ValueError(
                f"fused=True: parameter of shape {tuple(part.shape)} and strides {part.stride()}: expected "
                "elements without gaps between them (a copy by .clone() has none)"
            )

    @property
    def is_current(self) -> bool:
        """Whether the parameter still has the dtype, device and strides that it had."""
        part = local(self.parameters[0])
        return self._kind == (part.dtype, part.device, part.stride())

    @property
    def data(self) -> Tensor:
        """The parameter's memory as a vector."""
        part = local(self.parameters[0])
        return alias(part, 0, part.numel())


class Stretch(NamedTuple):
    """Elements start..stop of a vector that take the same update, the k-th with `hyper`; None: no update."""

    start: int
    stop: int
    k: int
    hyper: Hyper | None


class FlatState:
    """Gradients and state of the parameters of one vector; the optimizer's state holds views of it.

    Gradients and state of a DTensor are DTensors too, whose local parts are these views.

    placed: parameters whose gradients backward itself puts into their vector; `begin` copies other gradients there.
            Empty with DDP, which has a place for them already

    When the vector is laid out anew, for another optimizer of these parameters, the next update follows suit.
    """

    def __init__(self, vector: FlatVector | Alone, *, placed: Container[nn.Parameter] = ()) -> None:
        self.vector = vector
        self._placed = placed
        self._stretches: list[Stretch] = []
        self._written: list[nn.Parameter] = []  # parameters whose version has to count this update
        self._handles: list[RemovableHandle] = []
        self._lay_out()

    def _lay_out(self) -> None:
        self.close()
        self._slots = self.vector.slots
        self._state: dict[str, Tensor] = {}  # vectors by name
        self._views: dict[str, list[Tensor]] = {}  # their views, by parameter
        self._spans: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # x, m, v and a of earlier updates
        self._address = 0  # of x in these
        self._gradient = torch.zeros(0)
        self._gradient_views: list[Tensor] = []
        if any(parameter in self._placed for parameter in self.vector.parameters):
            self._make_gradient()
        for parameter, view in zip(self.vector.parameters, self._gradient_views, strict=False):
            if parameter in self._placed and parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(_placing(view)))

    def close(self) -> None:
        """Leave gradients where backward puts them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(
        self, updates: MutableMapping[nn.Parameter, tuple[int, Hyper]], state: Mapping[nn.Parameter, dict[str, Any]]
    ) -> None:
        """Prepare an update: put gradients and state in place.

        updates: {parameter: (k, hyper)} of parameters with a gradient, for their k-th update; parameters in this
                 vector are removed from it
        state:   the optimizer's state, with a dict for each of them
        """
        if self._slots is not self.vector.slots:
            self._lay_out()
        self._stretches, self._written = [], []
        ends = [*(slot.offset for slot in self._slots[1:]), self.vector.data.numel()]
        begin, stop, last = 0, 0, None
        for index, (slot, parameter, end) in enumerate(zip(self._slots, self.vector.parameters, ends, strict=True)):
            update = updates.pop(parameter, None)
            if update is not None:
                self._place(index, parameter, state[parameter], update[1])
                self._written.append(parameter)
            if slot.offset != stop or update != last:
                if stop > begin:
                    self._stretches.append(Stretch(begin, stop, *(last or (0, None))))
                begin, last = slot.offset, update
            # Padding is updated with the parameter before it: it is 0 and stays 0, except for 0 / 0 with eps = 0.
            stop = end if update is None or update[1].eps > 0 else slot.offset + slot.numel
        if stop > begin:
            self._stretches.append(Stretch(begin, stop, *(last or (0, None))))

    def update(self, span: slice, incoming: Incoming | None = None) -> None:
        """Update elements `span`, after merging `incoming`, if given, into all of them, with a gradient or without."""
        if self._written:  # as any write in place does; not in `begin`, when messages may still be in flight
            torch.autograd.graph.increment_version(self._written)
            self._written = []
        own, weight = (1.0, 0.0) if incoming is None else incoming[1:]
        for stretch in self._stretches:
            start, stop = max(span.start, stretch.start), min(span.stop, stretch.stop)
            if start >= stop:
                continue
            received = None if incoming is None else alias(incoming.tensor, start - span.start, stop - span.start)
            if stretch.hyper is None:
                if received is not None:
                    merge_(alias(self.vector.data, start, stop), received, own, weight)
                continue
            x, *moments = self._lasting(start, stop, accumulates=stretch.hyper.s > 1)
            a = moments[2] if stretch.hyper.s > 1 else None
            vectors = Vectors(x, alias(self._gradient, start, stop), *moments[:2], a, received)
            update_compiled(vectors, stretch.k, stretch.hyper, own, weight)

    def _lasting(self, start: int, stop: int, accumulates: bool) -> tuple[Tensor, ...]:
        """Return elements start..stop of x, m, v and, if needed, a; kept, as making these tensors takes time."""
        data = self.vector.data
        if data.data_ptr() != self._address:
            self._spans.clear()
            self._address = data.data_ptr()
        if (start, stop) not in self._spans:
            if len(self._spans) >= KEPT_SPANS:
                del self._spans[next(iter(self._spans))]  # the oldest
            names = STATE_NAMES if "accumulator" in self._state else STATE_NAMES[:2]
            lasting = (data, *(self._state[name] for name in names))
            self._spans[start, stop] = tuple(alias(tensor, start, stop) for tensor in lasting)
        return self._spans[start, stop]

    def _place(self, index: int, parameter: nn.Parameter, state: dict[str, Any], hyper: Hyper) -> None:
        if len(self._slots) == 1 and not self._handles:
            part, gradient = local_parts((parameter, parameter.grad))
            if gradient.stride() != part.stride():
                gradient = torch.empty_like(part).copy_(gradient)
            self._gradient = alias(gradient, 0, gradient.numel())
        else:
            if not self._gradient_views:
                self._make_gradient()
            if (gradient := parameter.grad) is not (view := self._gradient_views[index]):
                part, gradient = local_parts((view, gradient))
                part.copy_(gradient)
        for name in STATE_NAMES[: 3 if hyper.s > 1 else 2]:
            if name not in self._state:
                self._state[name] = self._zeros()
                self._views[name] = self._views_of(self._state[name])
                self._spans.clear()
            view, found = self._views[name][index], state.get(name)
            if found is None:
                local(view).zero_()
            elif found is not view:  # a state that was loaded, or was there before
                part, found = local_parts((view, found))
                part.copy_(found)
            state[name] = view

    def _make_gradient(self) -> None:
        self._gradient = self._zeros()
        self._gradient_views = self._views_of(self._gradient)

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.vector.data)

    def _views_of(self, vector: Tensor) -> list[Tensor]:
        return [
            placed_as(parameter, vector.as_strided(slot.size, slot.stride, slot.offset))
            for slot, parameter in zip(self._slots, self.vector.parameters, strict=True)
        ]


def _placing(view: Tensor) -> Any:
    """Return the hook that moves a parameter's gradient to its place in the vector of gradients."""

    @torch.no_grad()
    def place(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient.layout == torch.strided and not gradient.requires_grad and gradient is not view:
            part, gradient = local_parts((view, gradient))
            part.copy_(gradient)
            parameter.grad = view

    return place


def alias(dense: Tensor, start: int, stop: int) -> Tensor:
    """Return elements start..stop of the memory of a dense tensor as a vector.

    Not a view: the compiler would make a kernel for each number of dimensions of the viewed tensor.
    """
    return dense.data.as_strided((stop - start,), (1,), dense.storage_offset() + start).data
