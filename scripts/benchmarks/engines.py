"""Models, waits in place of their computing, and the data-parallel engines around them, which measures.py times."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.planner.cluster import Variation

LR = 1e-4
TIMEOUT_S = 300.0  # of a message
BACKWARD_SHARE = 2 / 3  # of a step's waits
LAYERS = 8  # of the model of measure=scaling; their gradients come one after another
OPTIONS = {"staggered": {"phases": "staggered"}, "push_sum": {"push_sum": True}, "atc": {"order": "atc"}}


class Workload(NamedTuple):
    """A model to train: loss(model) runs the forward pass."""

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]


def gpt(layers: int, heads: int, width: int, vocabulary: int) -> Workload:
    """Return a GPT that sees 2 windows of 128 tokens."""
    from gpt2.config import Shape
    from gpt2.model import GPT2

    module = GPT2(Shape(layers=layers, heads=heads, width=width, vocabulary=vocabulary, context=128))
    tokens = torch.randint(vocabulary, (2, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    return Workload(module, lambda model: model(tokens[:, :-1], tokens[:, 1:]))


def digits_resnet() -> Workload:
    """Return the small ResNet of the digits recipes, with 32 images."""
    from cnn.model import SmallResNet

    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(32, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    return Workload(SmallResNet(1, 10, 32), lambda model: nn.functional.cross_entropy(model(images), labels))


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt_5m": partial(gpt, layers=4, heads=4, width=256, vocabulary=12_288),
    "gpt_30m": partial(gpt, layers=8, heads=8, width=512, vocabulary=8_192),
    "digits_resnet": digits_resnet,
}


def equal_layers(payload_mb: float, device: torch.device) -> nn.Sequential:
    """Return LAYERS equal square linear layers of about payload_mb MB (1e6 bytes, fp32) in all."""
    width = round(math.sqrt(payload_mb * 1e6 / 4 / LAYERS))
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)))


# Several ranks on few cores take turns at computing, which no cluster does; a wait leaves the cores to the engine.


class Waiter:
    """Short sleeps that are exact on average: if one takes too long, later ones are shorter."""

    SHORTEST_S = 0.001

    def __init__(self) -> None:
        self._owed = 0.0

    def wait(self, seconds: float) -> None:
        """Wait, now or together with later calls."""
        self._owed += seconds
        if self._owed >= self.SHORTEST_S:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin


class EmulatedCompute(nn.Module):
    """The parameters of `module` (the same objects), with a forward and a backward that wait.

    compute_ms:     of forward and backward together, shared among the parameters by their size
    variation:      of this time from step to step; None: always the same

    `forward()` returns a scalar; its backward gives every parameter a fixed random gradient, last parameter first.
    """

    def __init__(self, module: nn.Module, compute_ms: float, variation: Variation | None = None) -> None:
        super().__init__()
        self.module = module
        self._waiter = Waiter()
        self._variation = variation or Variation(seed=(0, 0))
        generator = torch.Generator().manual_seed(0)
        trained = [p for p in module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in trained)
        self._layers = []
        for parameter in trained:
            gradient = torch.randn(parameter.shape, generator=generator).mul_(0.01).to(parameter.device)
            self._layers.append((parameter, gradient, compute_ms / 1000 * parameter.numel() / total))

    def forward(self) -> Tensor:
        """Return a scalar with gradient, after the forward's share of the time."""
        activation = torch.zeros((), requires_grad=True)
        longer = self._variation.draw().item()
        for parameter, gradient, seconds in self._layers:
            activation = _Layer.apply(activation, parameter, gradient, longer * seconds, self._waiter)
        return activation


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, parameter: Tensor, gradient: Tensor, seconds: float, waiter: Waiter
    ) -> Tensor:
        ctx.rest = gradient, seconds, waiter
        waiter.wait(seconds * (1 - BACKWARD_SHARE))
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple:
        gradient, seconds, waiter = ctx.rest
        waiter.wait(seconds * BACKWARD_SHARE)
        return incoming, gradient, None, None, None


class Engine(NamedTuple):
    """An engine around a model.

    model:    passed to the loss
    update:   called after backward
    close:    ends the engine
    waited_s: seconds that this rank has waited for messages so far, if the engine counts them
    """

    model: nn.Module
    update: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    waited_s: Callable[[], float | None] = lambda: None


def engine_of(
    name: str, module: nn.Module, topology: str, bucket_mb: float, L: int, accumulation_steps: int = 1
) -> Engine:
    """Put an engine around a model. Raises ValueError if the topology does not exist for these workers. Collective.

    name:      alone; ddp, decent_dp: the peers; allreduce, ours, ours_local, ours_torch: this project's
    topology:  for gossip, see `gossip`; for decent_dp, its own name; for alone, which AdamW: "torch" or "fused"; for
               allreduce, "complete" or "complete/fp16", with gradients averaged in 16 bits
    bucket_mb: of messages, in MiB
    L:         ranks on a host
    accumulation_steps: of this project's AdamW
    """
    if name == "decent_dp":
        return _decent_dp(module, topology, bucket_mb)
    model = module
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
    elif name == "allreduce":
        from common.parallel import AllReduceDataParallel

        hook = "fp16" if topology.endswith("/fp16") else None
        model = AllReduceDataParallel(module, bucket_mb=bucket_mb, hook=hook)
    elif name != "alone":
        model = gossip(module, topology, bucket_mb, L)
    if name in ("ddp", "ours_torch") or topology == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    else:
        from common.optim import AccumAdamW

        optimizer = AccumAdamW(module.parameters(), lr=LR, accumulation_steps=accumulation_steps, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if name in ("alone", "ddp"):
        return Engine(model, update)
    model.attach(optimizer)
    return Engine(model, update, model.close, lambda: model.counters.exposed_s)


def _decent_dp(module: nn.Module, topology: str, bucket_mb: float) -> Engine:
    """Return decent-dp, which steps its optimizers in the hooks of backward."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    model = DecentralizedDataParallel(
        module,
        optim_fn=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=LR),
        topology=topology,
        bucket_size_in_mb=bucket_mb,
    )
    return Engine(model)


def gossip(module: nn.Module, topology: str, bucket_mb: float, L: int) -> nn.Module:
    """Wrap a model for gossip. Raises ValueError if the topology does not exist for these workers. Collective.

    topology: a name with /between_hosts, /H/TAU for local steps, and keys of OPTIONS
    """
    from common.parallel import DecentralizedDataParallel, Outer
    from common.topology import build

    name, *options = topology.split("/")
    between = "between_hosts" in options
    if between and L == 1:
        raise ValueError("hosts have one rank each: it is the topology itself")
    numbers = [int(option) for option in options if option.isdecimal()]
    local = dict(zip(("local_steps", "merge_after"), numbers, strict=False))
    if local:
        local["outer"] = Outer(lr=0.4, momentum=0.9)
    for option in options:
        local |= OPTIONS.get(option, {})
    built = build(name, dist.get_world_size(), L, between_hosts=between)
    return DecentralizedDataParallel(module, built, bucket_mb=bucket_mb, timeout_s=TIMEOUT_S, **local)
