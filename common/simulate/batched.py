"""Forward and backward of all simulated workers as one batch: one kernel then serves all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from common.simulate.replica import SimulatedReplica, copied
from common.torch_internals import tree_map

Place = tuple[dict[str, Tensor], str]  # a module's parameters or buffers, and a name among them


class BatchedWorkers:
    """The workers of a simulation, whose models run as one with a leading dimension of workers (torch.func.vmap).

    loss: (module, batch) -> the scalar loss. torch.func must be able to map it: no branches on values, no `.item()`
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._replicas = list(replicas)
        modules = [replica.bare_module for replica in replicas]
        self._loss = _Loss(copied(modules[0]), loss).train()  # its values are never used
        # Looked up once: walking over all modules in every step takes time.
        self._parameters = _places(modules, "_parameters", dict(modules[0].named_parameters()))
        self._buffers = _places(modules, "_buffers", dict(modules[0].named_buffers()))
        self._stacked: dict[str, Tensor] = {}  # all workers' parameters, between forward and backward

    def forward(self, batches: Sequence[Any]) -> Tensor:
        """Return every worker's loss on its batch, [N]; batches have equal structure and shapes.

        Random draws, as for dropout, differ between workers and come from torch's global generator.
        """
        for replica in self._replicas:
            if not replica.training:
                replica.train()
            replica.before_forward()
        self._stacked, buffers = _stack(self._parameters), _stack(self._buffers)
        batch = tree_map(lambda *tensors: torch.stack(tensors), *batches)
        losses = vmap(self._call, randomness="different")(self._stacked, buffers, batch)
        with torch.no_grad():
            for name, places in self._buffers.items():
                torch._foreach_copy_(_at(places), list(buffers[name].unbind()))
        return losses

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar function of the losses to the parameters' `.grad`; no hooks are called."""
        trained = {name: stacked for name, stacked in self._stacked.items() if stacked.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        self._stacked = {}
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                _accumulate(_at(self._parameters[name]), gradient)

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
        state = {f"module.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        return functional_call(self._loss, state, (batch,))


class _Loss(nn.Module):
    """A module whose forward returns another module's loss, as `functional_call` needs it."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


def _places(modules: Sequence[nn.Module], kind: str, names: Iterable[str]) -> dict[str, list[Place]]:
    """Return, by name, where each worker's module holds the tensor; it may be replaced there later."""
    split = {name: name.rpartition(".") for name in names}
    return {
        name: [(getattr(module.get_submodule(parent), kind), key) for module in modules]
        for name, (parent, _, key) in split.items()
    }


def _at(places: Iterable[Place]) -> list[Tensor]:
    return [tensors[key] for tensors, key in places]


@torch.no_grad()
def _stack(by_name: dict[str, list[Place]]) -> dict[str, Tensor]:
    """Return new leaves [N, ...] for each name."""
    found = {name: _at(places) for name, places in by_name.items()}
    return {name: torch.stack(tensors).requires_grad_(tensors[0].requires_grad) for name, tensors in found.items()}


@torch.no_grad()
def _accumulate(parameters: Sequence[Tensor], gradients: Tensor) -> None:
    """Add row i of the gradients [N, ...] to the gradient of parameter i."""
    for parameter, gradient in zip(parameters, gradients.unbind(), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.contiguous()
        else:
            parameter.grad += gradient
