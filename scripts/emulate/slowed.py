"""Trains with waits in the model's layers, so that a step takes as long as on an accelerator and leaves the cores free.

EMULATED_HOSTS='{"compute_ms": 100}' torchrun ... -m scripts.emulate.slowed gpt2.train experiment=quickstart ...

scripts.emulate starts it with compute_ms=...; what is trained is what gpt2.train alone would train, bit for bit. Waits
are shared among layers by their parameters; the real computing comes on top. With engine=decent_dp, decent-dp takes the
place of our gossip (decent_dp.py).
"""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from common.launch.cli import main
from common.planner.cluster import Variation
from common.planner.conditions import CONDITIONS
from common.training import worker
from common.training.task import load_task
from scripts.emulate import decent_dp
from scripts.emulate.compute import BACKWARD_SHARE, Waiter


class Waits:
    """Waits in the layers of a module while it trains: `compute_ms` for forward and backward of a batch, as they vary.

    The first batch shows which layers run, and how often; it waits for too long or too short a time.
    """

    def __init__(self, module: nn.Module, compute_ms: float, variation: Variation) -> None:
        self._waiter = Waiter()
        self._variation = variation
        self._longer = 1.0
        self._compute_s = compute_ms / 1000
        self._total = sum(p.numel() for p in module.parameters())  # of the layers that a batch runs through
        self._passed = 0
        module.register_forward_pre_hook(self._begin)
        for layer in module.modules():
            if numel := sum(p.numel() for p in layer.parameters(recurse=False)):
                layer.register_forward_hook(lambda _, __, output, numel=numel: self._wait(output, numel))

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._longer = self._variation.draw().item()
            self._total, self._passed = self._passed or self._total, 0

    def _wait(self, output: Tensor, numel: int) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        self._passed += numel
        seconds = self._compute_s * numel / self._total * self._longer
        self._waiter.wait(seconds * (1 - BACKWARD_SHARE))
        return _BackwardWait.apply(output, seconds * BACKWARD_SHARE, self._waiter)


class _BackwardWait(torch.autograd.Function):
    """The identity; its backward waits first, so that a layer's gradient is ready as late as on an accelerator."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, seconds: float, waiter: Waiter) -> Tensor:
        ctx.rest = seconds, waiter
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        seconds, waiter = ctx.rest
        waiter.wait(seconds)
        return gradient, None, None


def slow_down(name: str) -> None:
    """Have a task build models that wait, and train them with another engine, as EMULATED_HOSTS says."""
    settings = json.loads(os.environ["EMULATED_HOSTS"])
    if settings.get("engine") == "decent_dp":
        worker.parallelize = decent_dp.parallelize
    condition = CONDITIONS[settings.get("condition", "even")]
    factor = condition.slow_host if int(os.environ["GROUP_RANK"]) == 0 else 1.0
    task = load_task(name)
    build = task.build_model

    def build_slowed(self: Any) -> nn.Module:
        module = build(self)
        Waits(module, settings["compute_ms"], condition.variation_of(factor, (0, int(os.environ["RANK"]))))
        return module

    task.build_model = build_slowed


if __name__ == "__main__":
    task = sys.argv.pop(1).removesuffix(".train")
    slow_down(task)
    main(task)
