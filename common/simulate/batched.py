"""Forward and backward of all simulated workers as one batch: one kernel then serves all of them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from common.simulate.replica import SimulatedReplica


class BatchedWorkers:
    """The workers of a simulation, whose models run as one with a leading dimension of workers (torch.func.vmap).

    loss: (module, batch) -> the scalar loss. torch.func has to be able to map it: no decision by values, no `.item()`
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._replicas = list(replicas)
        self._modules = [replica.bare_module for replica in replicas]
        self._loss = _Loss(copy.deepcopy(self._modules[0]), loss).train()  # whose values are never used
        self._parameters: dict[str, Tensor] = {}  # of all, between forward and backward

    def forward(self, batches: Sequence[Any]) -> Tensor:
        """Return every worker's loss on its batch, [N]; batches have equal structure and shapes.

        What is drawn at random, as by dropout, differs between workers and comes from torch's global generator.
        """
        for replica in self._replicas:
            if not replica.training:
                replica.train()
            replica.before_forward()
        self._parameters, buffers = stack_module_state(self._modules)
        batch = tree_map(lambda *tensors: torch.stack(tensors), *batches)
        losses = vmap(self._call, randomness="different")(self._parameters, buffers, batch)
        self._write_buffers(buffers)
        return losses

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar function of the losses to the parameters' `.grad`."""
        trained = {name: stacked for name, stacked in self._parameters.items() if stacked.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        self._parameters = {}
        self._add(dict(zip(trained, gradients, strict=True)))

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
        state = {f"module.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        return functional_call(self._loss, state, (batch,))

    def _add(self, gradients: dict[str, Tensor | None]) -> None:
        """Accumulate as backward would: into `.grad`, with the hooks of the parameters."""
        leaves, values = [], []
        for index, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                if (gradient := gradients.get(name)) is not None:
                    leaves.append(parameter)
                    values.append(gradient[index])
        torch.autograd.backward(leaves, values)

    @torch.no_grad()
    def _write_buffers(self, buffers: dict[str, Tensor]) -> None:
        for index, module in enumerate(self._modules):
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name][index])


class _Loss(nn.Module):
    """A module whose forward returns the loss of another one, as `functional_call` wants it."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)
