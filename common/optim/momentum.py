"""What the momentum SGDs of this package share: a momentum for each parameter, and how they go over parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.dtensors import count_writes
from common.optim.foreach import chunked, dense_grad


class MomentumOptimizer(Optimizer):
    """An optimizer whose state is `momentum_buffer`, of each parameter's shape, dtype and memory layout.

    deferred: set by an engine that takes the second half of a step itself, after mixing
    """

    deferred: bool = False  # a copy is attached to nothing, so it starts again from this one

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield (group, parameters, gradients, momenta) over all parameters that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [dense_grad(type(self).__name__, param) for param in params]
            momenta = [self._momentum_of(param) for param in params]
            count_writes(params)
            for _, chunk in chunked((params, grads, momenta), keys=[None] * len(params)):
                yield group, *chunk

    def _momentum_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if state.get("momentum_buffer") is None:  # None: from a torch.optim.SGD without momentum
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["momentum_buffer"]
