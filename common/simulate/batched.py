"""Forward and backward of all simulated workers as one batch: one kernel then serves all of them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from common.simulate.replica import SimulatedReplica


class BatchedWorkers:
    """The workers of a simulation, whose models run as one with a leading dimension of workers (torch.func.vmap).

    loss: (module, batch) -> the scalar loss. torch.func has to be able to map it: no decision by values, no `.item()`
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._replicas = list(replicas)
        modules = [replica.bare_module for replica in replicas]
        self._loss = _Loss(copy.deepcopy(modules[0]), loss).train()  # whose values are never used
        # By name, one tensor for each worker. Looked up once: walking over all modules in every step takes time.
        self._parameters = _by_name([module.named_parameters() for module in modules])
        self._buffers = _by_name([module.named_buffers() for module in modules])
        self._stacked: dict[str, Tensor] = {}  # the parameters of all, between forward and backward

    def forward(self, batches: Sequence[Any]) -> Tensor:
        """Return every worker's loss on its batch, [N]; batches have equal structure and shapes.

        What is drawn at random, as by dropout, differs between workers and comes from torch's global generator.
        """
        for replica in self._replicas:
            if not replica.training:
                replica.train()
            replica.before_forward()
        self._stacked, buffers = _stack(self._parameters), _stack(self._buffers)
        batch = tree_map(lambda *tensors: torch.stack(tensors), *batches)
        losses = vmap(self._call, randomness="different")(self._stacked, buffers, batch)
        with torch.no_grad():
            for name, of_workers in self._buffers.items():
                torch._foreach_copy_(of_workers, list(buffers[name].unbind()))
        return losses

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar function of the losses to the parameters' `.grad`; no hooks are called."""
        trained = {name: stacked for name, stacked in self._stacked.items() if stacked.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        self._stacked = {}
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                _accumulate(self._parameters[name], gradient)

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
        state = {f"module.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        return functional_call(self._loss, state, (batch,))


class _Loss(nn.Module):
    """A module whose forward returns the loss of another one, as `functional_call` wants it."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


def _by_name(of_workers: Sequence[Iterator[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
    named = [dict(tensors) for tensors in of_workers]
    return {name: [tensors[name] for tensors in named] for name in named[0]}


@torch.no_grad()
def _stack(tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return new leaves [N, ...] for each name."""
    return {
        name: torch.stack(of_workers).requires_grad_(of_workers[0].requires_grad)
        for name, of_workers in tensors.items()
    }


@torch.no_grad()
def _accumulate(parameters: Sequence[Tensor], gradients: Tensor) -> None:
    """Add row i of the gradients [N, ...] to that of parameter i."""
    for parameter, gradient in zip(parameters, gradients.unbind(), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.contiguous()
        else:
            parameter.grad += gradient
